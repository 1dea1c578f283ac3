"""Several clients at once: each has its own text, in turns that are fair, and may go."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from typing import Any

import pytest

from hetero import LLM
from tests.serving.servers import Server, serving
from tests.serving.test_lifecycle import idle, wait_for

LONG = 60
ASKED: dict[str, Any] = {"max_tokens": LONG, "temperature": 0, "logit_bias": {"1": -100}}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="npu", kv="f32") as opened:
        yield opened


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its caches hold floats: in 16 bits the last bit of a sum may be rounded to the next value."""
    options = ("--alias", "tiny", "--contexts-per-app", "8", "--kv", "f32")
    with serving(tmp_path_factory.mktemp("exact"), *options) as found:
        yield found


def ask(server: Server, app: str, body: dict[str, Any]) -> Any:
    with server.client(app) as client:
        answer = client.post("/v1/completions", json=ASKED | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_each_text_is_what_it_is_alone(exact: Server, llm: LLM) -> None:
    """Other lengths of prompt and answer, sampled and greedy, stops and grammars, beside each
    other; some wait for a place.
    """
    bodies: list[dict[str, Any]] = [
        {"prompt": [300 + i, *range(100, 104 + 7 * i)], "max_tokens": LONG - 7 * (i % 5)}
        for i in range(9)
    ]
    bodies[2] |= {"temperature": 1.2, "seed": 5}
    bodies[3] |= {"stop": [" the"]}
    bodies[4] |= {"logprobs": 2}
    bodies[5] |= {"guided_regex": "[a-z ]{30,40}", "logit_bias": {}}
    apps = ["notes", "mail", "notes"] * 3
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        together = list(pool.map(lambda x: ask(exact, *x), zip(apps, bodies, strict=True)))
    for body, answer in zip(bodies, together, strict=True):
        (choice,) = answer["choices"]
        assert answer["usage"]["prompt_tokens"] == len(body["prompt"])
        alone = ask(exact, "notes", body | {"cache_salt": "alone"})
        assert choice["text"] == alone["choices"][0]["text"]
        assert choice["finish_reason"] == alone["choices"][0]["finish_reason"]
    options: dict[str, Any] = {"max_tokens": LONG, "logit_bias": {1: -100.0}}
    assert together[0]["choices"][0]["text"] == llm.generate(bodies[0]["prompt"], **options).text
    found = together[4]["choices"][0]["logprobs"]["token_logprobs"]
    expected = llm.generate(
        bodies[4]["prompt"], **(options | {"logprobs": 2, "max_tokens": len(found)})
    )
    assert found == pytest.approx([x.logprob for x in expected.logprobs], abs=1e-3)


@pytest.mark.full
def test_one_of_several_may_go(server: Server) -> None:
    body = ASKED | {"prompt": [400, 101, 102], "max_tokens": 300, "stream": True}
    with server.client() as client, concurrent.futures.ThreadPoolExecutor(3) as pool:
        others = [
            pool.submit(ask, server, "mail", {"prompt": [410 + i, 7], "max_tokens": 100})
            for i in range(3)
        ]
        with client.stream("POST", "/v1/completions", json=body) as got:
            for line in got.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                    break
        texts = [other.result()["choices"][0]["text"] for other in others]
    for i, text in enumerate(texts):
        again = ask(server, "mail", {"prompt": [410 + i, 7], "max_tokens": 100, "cache_salt": "x"})
        assert text == again["choices"][0]["text"]
    wait_for(lambda: idle(server), 5)


@pytest.mark.parametrize("streams", [False, True])
def test_two_calls_of_one_conversation_follow_each_other(server: Server, streams: bool) -> None:
    with server.client() as client:
        conversation = client.post("/v1/conversations", json={}).json()["id"]
        body = {"conversation": conversation, "max_output_tokens": 20, "stream": streams}

        def say(text: str) -> Any:
            with server.client() as own:
                answer = own.post("/v1/responses", json=body | {"input": text})
                assert answer.status_code == 200
                if not streams:
                    return answer.json()
                last = answer.text.strip().split("\n\n")[-1]  # completed, or incomplete
                return json.loads(last.partition("data: ")[2])["response"]

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(say, ["One", "Two"]))
        first, second = sorted((x["usage"] for x in answers), key=lambda x: x["input_tokens"])
        assert second["input_tokens"] > first["total_tokens"]  # the text of the other is in it
        assert say("Three")["usage"]["input_tokens"] > second["total_tokens"]
        items = client.get(f"/v1/conversations/{conversation}/items").json()["data"]
        roles = [item["role"] for item in reversed(items)]
        assert roles == ["user", "assistant"] * 3
        assert client.delete(f"/v1/conversations/{conversation}").status_code == 200
