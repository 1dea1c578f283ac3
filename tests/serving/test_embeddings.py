"""Embeddings over the official client: the library's, beside answers, in both encodings."""

from __future__ import annotations

import base64
import concurrent.futures
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from hetero import LLM
from tests.models.gguf_files import write_tiny
from tests.serving.servers import KEYS, Server, serving

openai = pytest.importorskip("openai")
TEXTS = ["One day", "a cat sat on a mat", "a cat sat on a mat " * 12]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=KEYS["notes"], max_retries=0, timeout=60
    ) as found:
        yield found


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="npu") as found:
        yield found


def test_embeddings_are_the_librarys(client: Any, llm: LLM) -> None:
    expected = llm.embed(TEXTS)
    tokens = [llm.encode(text) for text in TEXTS]
    for given in (TEXTS, tokens):
        found = client.embeddings.create(model="demo", input=given)  # in base64
        np.testing.assert_allclose([x.embedding for x in found.data], expected, atol=1e-6)
        assert [x.index for x in found.data] == [0, 1, 2]
        assert found.usage.prompt_tokens == sum(map(len, tokens)) == found.usage.total_tokens
    plain = client.embeddings.create(model="demo", input=TEXTS[0], encoding_format="float")
    alone = llm.embed(TEXTS[:1])[0]
    np.testing.assert_allclose(plain.data[0].embedding, alone, atol=1e-6)
    np.testing.assert_allclose(alone, expected[0], atol=1e-3)  # read together with another text
    one = client.embeddings.create(model="demo", input=tokens[0], dimensions=8)
    np.testing.assert_allclose(
        one.data[0].embedding, llm.embed(TEXTS[:1], dimensions=8)[0], atol=1e-6
    )


def test_base64_has_the_floats(server: Server) -> None:
    with server.client() as client:
        bodies = [
            client.post("/v1/embeddings", json={"input": "One day", "encoding_format": form}).json()
            for form in ("float", "base64")
        ]
    floats, coded = (body["data"][0]["embedding"] for body in bodies)
    assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == floats
    assert np.linalg.norm(floats) == pytest.approx(1, abs=1e-6)


@pytest.mark.full
def test_embeddings_and_answers_leave_each_other_alone(server: Server, llm: LLM) -> None:
    ask = {"prompt": "One day", "max_tokens": 40, "temperature": 0}
    with server.client() as client, concurrent.futures.ThreadPoolExecutor(8) as pool:
        alone = client.post("/v1/completions", json=ask).json()["choices"][0]["text"]
        answers = [pool.submit(client.post, "/v1/completions", json=ask) for _ in range(3)]
        embedded = [
            pool.submit(client.post, "/v1/embeddings", json={"input": TEXTS}) for _ in range(4)
        ]
        assert {x.result().json()["choices"][0]["text"] for x in answers} == {alone}
        for each in embedded:
            rows = [x["embedding"] for x in each.result().json()["data"]]
            np.testing.assert_allclose(rows, llm.embed(TEXTS), atol=1e-6)
        again = client.post("/v1/completions", json=ask).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "param", "what"),
    [
        ({"input": ""}, "input", "is empty"),
        ({"input": []}, "input", "1 to 2048 texts"),
        ({"input": ["a", ""]}, "input", "is empty"),
        ({"input": [10**6]}, "input", "outside the vocabulary"),
        ({"input": [5] * 9000}, "input", "shorten it"),
        ({"input": "a", "dimensions": 10**6}, "dimensions", "ask for fewer"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float"),
        ({}, "input", "required"),
    ],
)
def test_what_cannot_be_embedded(server: Server, body: Any, param: str, what: str) -> None:
    with server.client() as client:
        answer = client.post("/v1/embeddings", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["type"] == "invalid_request_error"
    assert error["param"].split(".")[0] == param
    assert what in error["message"]


@pytest.mark.full
def test_the_pooling_of_the_file_and_of_the_option(tmp_path: Path) -> None:
    """The file says one that is no decoder's: without the option embeddings are refused."""
    path = write_tiny(tmp_path / "m.gguf", pooling_type=2)
    tokens = [5, 6, 7]
    with serving(tmp_path / "a", model=str(path)) as server, server.client() as client:
        refused = client.post("/v1/embeddings", json={"input": tokens})
        assert refused.status_code == 400
        assert "pooled by 'cls'" in refused.json()["error"]["message"]
    options = ("--pooling", "mean")
    with serving(tmp_path / "b", *options, model=str(path)) as server, server.client() as client:
        found = client.post("/v1/embeddings", json={"input": tokens})
    with LLM(str(path), device="npu") as llm:
        expected = llm.embed([tokens], pooling="mean")
    np.testing.assert_allclose(found.json()["data"][0]["embedding"], expected[0], atol=1e-6)


def test_tokens_are_counted(server: Server) -> None:
    def counted(client: httpx.Client) -> float:
        lines = client.get("/metrics").text.splitlines()
        (line,) = (x for x in lines if x.startswith('hetero_tokens_total{kind="prompt",'))
        return float(line.split()[1])

    with server.client() as client:
        before = counted(client)
        usage = client.post("/v1/embeddings", json={"input": TEXTS}).json()["usage"]
        assert counted(client) - before == usage["prompt_tokens"]
