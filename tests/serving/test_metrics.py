"""The page for Prometheus: requests that run and wait, and for how long they waited."""

from __future__ import annotations

import httpx

from tests.serving.servers import Server
from tests.serving.test_lifecycle import wait_for


def value(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    (line,) = (x for x in lines if x.rpartition(" ")[0] == name)
    return float(line.rpartition(" ")[2])


def test_requests_run_and_have_waited(server: Server) -> None:
    body = {"prompt": "Once", "max_tokens": 480, "n": 16, "logit_bias": {"1": -100}}
    with server.client("mail") as client:
        before = value(client, 'hetero_queue_seconds_count{model="demo"}')
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            lines = answer.iter_lines()  # which ends the answer when it is dropped
            next(lines)
            assert value(client, 'hetero_engine_requests{model="demo",state="running"}') == 1
            assert value(client, 'hetero_engine_requests{model="demo",state="waiting"}') == 0
        del lines
        client.post("/v1/completions", json=body | {"max_tokens": 2, "n": 1})
        client.post("/v1/embeddings", json={"input": ["a", "b"]})
        wait_for(lambda: value(client, 'hetero_engine_requests{model="demo",state="running"}') == 0)
        assert (
            value(client, 'hetero_queue_seconds_count{model="demo"}') == before + 2
        )  # of whole answers
        assert value(client, 'hetero_queue_seconds_sum{model="demo"}') > 0
