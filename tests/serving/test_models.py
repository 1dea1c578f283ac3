"""Several models by name: loaded when asked for, unloaded for others or when idle."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import anthropic
import httpx
import openai
import pytest

from hetero.serving.metrics import Metrics
from hetero.serving.served_models import Models, ServedModel
from tests.models.gguf_files import write_tiny
from tests.serving.agents.assistant import write_assistant
from tests.serving.servers import KEYS, Server, free_port, serving
from tests.serving.test_lifecycle import children, wait_for
from tests.serving.test_metrics import value

ASKED: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
NAMES = ("assistant", "tiny")


def models_in(folder: Path) -> tuple[Path, Path]:
    folder.mkdir(parents=True)
    more: dict[str, Any] = {"context_length": 256, "tokenizer.chat_template": TEMPLATE}
    return write_assistant(folder / "assistant.gguf"), write_tiny(folder / "tiny.gguf", **more)


@pytest.fixture(scope="module")
def one_at_a_time(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of two models, one of which is loaded at a time."""
    folder = tmp_path_factory.mktemp("models")
    first, second = models_in(folder / "files")
    options = (str(second), "--models-max", "1", "--max-seq-len", "256")
    with serving(folder, *options, model=str(first)) as found:
        yield found


def complete(server: Server, model: str, prompt: str, **more: Any) -> httpx.Response:
    with server.client() as client:
        body = {**ASKED, "model": model, "prompt": prompt, **more}
        return client.post("/v1/completions", json=body)


def states(server: Server) -> dict[str, str]:
    with server.client() as client:
        cards = client.get("/v1/models").json()["data"]
    return {card["id"]: card["status"]["value"] for card in cards}


def engines(server: Server) -> list[int]:
    found = []
    for pid in children(server.process.pid):
        with suppress(OSError):  # it has ended meanwhile
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            found += [pid] if b"hetero.serving.engine_process" in command else []
    return found


@pytest.mark.full
def test_models_take_turns_and_answer_as_alone(one_at_a_time: Server) -> None:
    """In turn and at once, streamed and whole: each answer is its model's, none is refused."""
    server = one_at_a_time
    prompts = ("abc", "b a b", "aa", "c c")
    alone = {
        (name, prompt): complete(server, name, prompt).json()["choices"][0]["text"]
        for name in NAMES
        for prompt in prompts
    }
    assert len(set(alone.values())) == len(alone)

    def one(i: int) -> None:
        name, prompt = NAMES[i // 2 % 2], prompts[i % len(prompts)]
        if i % 3:
            text = complete(server, name, prompt).json()["choices"][0]["text"]
        else:
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS["notes"]) as client:
                asked = {"model": name, "prompt": prompt, "max_tokens": 12, "temperature": 0}
                chunks = client.completions.create(
                    **asked, stream=True, extra_body={"ignore_eos": True}
                )
                text = "".join(chunk.choices[0].text for chunk in chunks)
        assert text == alone[name, prompt]
        assert list(states(server).values()).count("loaded") <= 1

    for i in (0, 2):
        one(i)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(one, range(12)))
    assert len(engines(server)) == 1
    with server.client() as client:
        loads = [value(client, f'hetero_model_loads_total{{model="{name}"}}') for name in NAMES]
        tokens = [
            value(client, f'hetero_tokens_total{{kind="completion",model="{name}"}}')
            for name in NAMES
        ]
    assert all(2 <= count <= 20 for count in loads)  # those that wait for a model share its turn
    assert sum(tokens) == 12 * (len(alone) + 14)


def test_first_requests_load_once(one_at_a_time: Server) -> None:
    other = next(name for name, state in states(one_at_a_time).items() if state == "unloaded")
    with one_at_a_time.client() as client:
        before = value(client, f'hetero_model_loads_total{{model="{other}"}}')
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda _: complete(one_at_a_time, other, "abc"), range(6)))
        assert {answer.status_code for answer in answers} == {200}
        assert value(client, f'hetero_model_loads_total{{model="{other}"}}') == before + 1
        assert value(client, f'hetero_model_loaded{{model="{other}"}}') == 1


@pytest.mark.full
def test_every_api_asks_for_its_model(one_at_a_time: Server) -> None:
    requests = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
        "/v1/responses": {"input": "a", "max_output_tokens": 2},
        "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
        "/v1/responses/input_tokens": {"input": "a"},
        "/v1/embeddings": {"input": "a"},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [1]},
        "/apply-template": {"messages": [{"role": "user", "content": "a"}]},
    }
    with one_at_a_time.client() as client:
        for path, body in requests.items():
            unknown = client.post(path, json={**body, "model": "none"})
            assert unknown.status_code == 404, path
            said = unknown.json()["error"]["message"]
            assert "'assistant', 'tiny'" in said
            answer = client.post(path, json={**body, "model": "assistant"})
            assert answer.status_code == 200, answer.text
        for path in ("/slots", "/props", "/tokenizer_info"):
            assert client.get(path, params={"model": "tiny"}).status_code == 200, path
            assert client.get(path, params={"model": "none"}).status_code == 404, path
        assert states(one_at_a_time) == {"assistant": "unloaded", "tiny": "loaded"}
        looked = client.get("/v1/hetero/contexts").json()  # of the first, which stays unloaded
        assert looked["models"] == [
            {"id": "assistant", "status": "unloaded"},
            {"id": "tiny", "status": "loaded"},
        ]
        assert client.get("/v1/models/tiny").json()["max_model_len"] == 256
    with (
        anthropic.Anthropic(base_url=one_at_a_time.url, api_key=KEYS["notes"]) as client_a,
        pytest.raises(anthropic.NotFoundError),
    ):
        client_a.messages.count_tokens(model="none", messages=[{"role": "user", "content": "a"}])


@pytest.mark.full
def test_a_conversation_goes_on_with_another_model(one_at_a_time: Server) -> None:
    """Its text is the same; tokens, keys and values are each model's own, and all are deleted."""
    root = one_at_a_time.folder / "contexts"
    asked = {"max_output_tokens": 4, "temperature": 0}
    with one_at_a_time.client() as client:
        name = client.post("/v1/conversations", json={}).json()["id"]
        context = name.removeprefix("conv_")
        items: list[dict[str, Any]] = []
        for model in ("assistant", "tiny", "assistant"):
            said = {"type": "message", "role": "user", "content": "abc"}
            whole = {"model": model, "input": [*items, said]}
            count = client.post("/v1/responses/input_tokens", json=whole).json()["input_tokens"]
            body = {**asked, "model": model, "input": "abc", "conversation": name}
            answer = client.post("/v1/responses", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["input_tokens"] == count  # by the model's own tokens
            items = client.get(f"/v1/conversations/{name}/items?order=asc").json()["data"]
        assert len(items) >= 6
        assert len(list(root.glob(f"*/apps/*/ctx-{context}.log"))) == 2
        assert client.delete(f"/v1/conversations/{name}").json()["deleted"]
    assert list(root.glob(f"*/apps/*/ctx-{context}.log")) == []


@pytest.mark.full
def test_a_model_that_fails_to_load_can_be_asked_again(tmp_path: Path) -> None:
    first, second = models_in(tmp_path / "files")
    with serving(tmp_path, str(second), "--max-seq-len", "256", model=str(first)) as server:
        moved = second.rename(tmp_path / "moved.gguf")
        failed = complete(server, "tiny", "abc")
        assert failed.status_code == 503
        assert failed.json()["error"]["code"] == "model_not_loaded"
        assert str(tmp_path) not in failed.text
        with server.client() as client:
            card = client.get("/v1/models/tiny").json()
        assert card["status"] == {"value": "unloaded", "failed": True}
        assert complete(server, "assistant", "abc").status_code == 200
        moved.rename(second)
        assert complete(server, "tiny", "abc").status_code == 200
        assert sorted(states(server).values()) == ["loaded", "loaded"]
        for engine in engines(server):  # one that is killed is loaded again
            os.kill(engine, signal.SIGKILL)
        wait_for(lambda: set(states(server).values()) == {"unloaded"})
        assert complete(server, "tiny", "abc").status_code == 200
        assert server.end() == 143
        assert engines(server) == []


@pytest.mark.full
def test_an_idle_model_is_unloaded_and_loaded_when_it_is_asked_for(tmp_path: Path) -> None:
    with serving(tmp_path, "--sleep-idle-seconds", "0.2") as server:
        wait_for(lambda: states(server) == {"demo": "unloaded"})
        wait_for(lambda: engines(server) == [])
        body = {**ASKED, "max_tokens": 400, "prompt": "Once", "stream": True}
        with server.client() as client:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
                assert states(server) == {"demo": "loaded"}
            wait_for(lambda: states(server) == {"demo": "unloaded"})
            assert client.get("/health").status_code == 200
            assert client.post("/tokenize", json={"prompt": "Once"}).status_code == 200


@pytest.mark.full
def test_the_memory_of_models_is_bounded(tmp_path: Path) -> None:
    """Two of 256 MiB and a bit are not in 400 MiB together."""
    first, second = models_in(tmp_path / "files")
    options = (str(second), "--models-memory", "400MiB", "--max-seq-len", "256")
    with serving(tmp_path, *options, model=str(first)) as server:
        for name in (*NAMES, NAMES[0]):
            assert complete(server, name, "abc").status_code == 200
            assert [x for x, state in states(server).items() if state == "loaded"] == [name]


class Engine:
    """An engine that takes `sizes[model]` bytes."""

    sizes: ClassVar[dict[str, int]] = {}

    def __init__(self, options: dict[str, Any], _queue: int) -> None:
        self.about = {"memory_bytes": self.sizes[options["model"]], "notes": []}

    async def start(self) -> None:
        """Take a moment."""
        await asyncio.sleep(0)

    async def stop(self) -> None:
        """As `start`."""
        await asyncio.sleep(0)


def loaded_after(asked: str, sizes: dict[str, int], most_bytes: int | None, most: int = 0) -> str:
    """The models in memory after each of `asked` was used, which were thought to take 1 byte."""

    async def use() -> list[str]:
        for name in asked:
            with ExitStack() as leases:
                await models.hold(models.find(name), leases)
        return [x.name for x in models.served if x.loaded]

    models = models_of(sizes, most=most, most_bytes=most_bytes)
    with engines_of(sizes):
        return "".join(asyncio.run(use()))


def models_of(sizes: dict[str, int], **limits: Any) -> Models:
    """Models that are thought to take 1 byte."""

    def state(name: str) -> Any:
        return SimpleNamespace(names=[name], model=SimpleNamespace(name=name), engine=None)

    served = [ServedModel(state(name), {"model": name}, 1) for name in sizes]
    return Models(served, None, Metrics(sizes), **limits)  # type: ignore[arg-type]


@contextmanager
def engines_of(sizes: dict[str, int]) -> Iterator[None]:
    """Engines take these sizes inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "sizes", sizes)
        patch.setattr("hetero.serving.served_models.EngineClient", Engine)
        yield


@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_model_at_work_is_not_idle(names: str) -> None:
    """However long it works; afterwards it is unloaded, and loaded when it is asked for."""
    idle_s = 0.05

    async def use() -> None:
        await models.start()
        with ExitStack() as leases:
            await models.hold(models.find("a"), leases)
            await asyncio.sleep(6 * idle_s)
            assert models.find("a").loaded
        async with asyncio.timeout(30):
            while models.find("a").loaded:
                await asyncio.sleep(idle_s)
        with ExitStack() as leases:
            await models.hold(models.find("a"), leases)
            assert models.find("a").loaded

    models = models_of(dict.fromkeys(names, 1), idle_s=idle_s)
    with engines_of(dict.fromkeys(names, 1)):
        asyncio.run(use())


def test_the_least_recently_used_models_make_room() -> None:
    sizes = {"a": 1, "b": 2, "c": 3, "d": 8}
    assert loaded_after("abc", sizes, None) == "abc"
    assert loaded_after("abc", sizes, None, most=2) == "bc"
    assert loaded_after("abc", sizes, 6) == "abc"
    assert loaded_after("abac", sizes, 5) == "ac"
    assert loaded_after("abc", sizes, 5) == "bc"  # what it takes is known once it is loaded
    assert loaded_after("abcd", sizes, 6) == "d"  # alone even if it takes more
    assert loaded_after("dad", sizes, 8) == "d"
    assert loaded_after("abcab", sizes, 6, most=2) == "ab"


@pytest.mark.full
@pytest.mark.parametrize(
    ("models", "said"),
    [
        (["demo", "demo"], "two models would be called 'demo': rename one, or serve it alone"),
        (["demo", "no/such.gguf"], "no/such.gguf"),
        (["demo", "--models-memory", "99MiB"], "demo takes 0.25 GiB with --context-memory, more"),
        (["demo", "--models-memory", "some"], "'some' is not a size: write it like 4GiB"),
    ],
)
def test_models_that_cannot_be_served_are_told_at_once(
    tmp_path: Path, models: list[str], said: str
) -> None:
    words = ["serve", *models, "--port", str(free_port()), "--directory", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, "-m", "hetero.start", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 2
    assert said in run.stderr
