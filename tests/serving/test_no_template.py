"""Serving a model that has no chat template: what is said over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.gguf_files import write_tiny
from tests.serving.servers import serving

MESSAGES = [{"role": "user", "content": "ab"}]


@pytest.mark.full
@pytest.mark.parametrize("template", [None, "{{ raise_exception('no system role') }}"])
def test_a_chat_names_what_can_be_asked_instead(template: str | None, tmp_path: Path) -> None:
    """The command line's `--raw` is no remedy for a client."""
    path = write_tiny(tmp_path / "m.gguf", tokenizer__chat_template=template)
    asked: dict[str, Any] = {"model": "m", "max_tokens": 2}
    with serving(tmp_path / "server", model=str(path)) as server, server.client() as client:
        for route in ("/v1/chat/completions", "/v1/messages"):
            answer = client.post(route, json={**asked, "messages": MESSAGES})
            assert answer.status_code == 400, answer.text
            assert "use /v1/completions" in answer.text
            assert "--raw" not in answer.text
        answer = client.post("/v1/responses", json={"model": "m", "input": "ab"})
        assert (answer.status_code, "use /v1/completions" in answer.text) == (400, True)
        done = client.post("/v1/completions", json={**asked, "prompt": "ab"})
        assert done.status_code == 200, done.text
