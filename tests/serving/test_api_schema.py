"""Random requests by our own OpenAPI document: no failure of the server, errors in their shape."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests.serving.servers import KEYS, Server
from tests.support.selection import examples

schemathesis = pytest.importorskip("schemathesis")
HEADERS = {"Authorization": f"Bearer {KEYS['mail']}"}
EXAMPLES = settings(
    max_examples=examples(12),
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.full
@pytest.mark.hypothesis
def test_random_requests_are_answered_or_refused_in_shape(server: Server) -> None:
    document = httpx.get(f"{server.url}/openapi.json", headers=HEADERS).json()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=server.url)
    count = 0

    def check(case: Any) -> None:
        nonlocal count
        count += 1
        body = case.body
        if isinstance(body, dict):  # short answers: what is random here is the request
            for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
                if isinstance(body.get(name), int) and body[name] > 0:
                    body[name] = min(body[name], 4)
            if isinstance(body.get("n"), int) and body["n"] > 0:
                body["n"] = min(body["n"], 2)
        answer = case.call(headers=HEADERS, timeout=60)
        assert answer.status_code < 500, (case.method, case.path, case.body, answer.text)
        if answer.status_code >= 400:
            error = answer.json()["error"]
            wanted = {"type", "message"} if "type" in answer.json() else {"message", "type"}
            assert wanted <= set(error), answer.text
            assert error["message"]
            assert "\n" not in error["message"]

    for operation in schema.get_all_operations():
        strategy = operation.ok().as_strategy()
        EXAMPLES(_given(strategy, check))()
    assert count > 100


def _given(strategy: Any, check: Any) -> Any:
    from hypothesis import given

    @given(case=strategy)
    def each(case: Any) -> None:
        check(case)

    return each
