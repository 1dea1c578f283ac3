"""`truncation: auto`: a conversation that fills its context goes on without the oldest tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.servers import Server

TURN = "The fox and the hare went over the hill to the old mill, and then they came home. " * 4


@pytest.mark.full
@pytest.mark.parametrize("by", ["conversation", "previous_response_id"])
def test_a_full_conversation_goes_on(server: Server, by: str) -> None:
    with server.client() as client:
        most = client.get("/props").json()["default_generation_settings"]["n_ctx"]
        given: dict[str, Any] = {"model": "demo", "max_output_tokens": 48, "temperature": 0}
        given |= {"truncation": "auto"}
        if by == "conversation":
            given["conversation"] = client.post("/v1/conversations", json={}).json()["id"]
        shifted: list[int] = []
        while len(shifted) < 40 and sum(x > 0 for x in shifted) < 3:
            asked = given | {"input": f"{TURN} {len(shifted)}"}
            said = client.post("/v1/responses", json=asked).json()
            assert said["error"] is None, said
            usage, about = said["usage"], said["hetero"]
            new = usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"]
            if shifted:  # nothing but the turn is computed, shifted or not
                left = usage["input_tokens"] - about["shifted_tokens"]
                assert left < most
                assert new - about["shifted_tokens"] < left / 2
            shifted.append(about["shifted_tokens"])
            if by != "conversation":
                given["previous_response_id"] = said["id"]
        assert sum(x > 0 for x in shifted) == 3
        if by == "conversation":
            items = client.get(f"/v1/conversations/{given['conversation']}/items?limit=100")
            assert len(items.json()["data"]) == 2 * len(shifted)
            assert client.delete(f"/v1/conversations/{given['conversation']}").json()["deleted"]


def test_instructions_stay(server: Server) -> None:
    """Without them in every request a response cannot be continued from by its tokens."""
    with server.client() as client:
        given: dict[str, Any] = {"model": "demo", "max_output_tokens": 48, "temperature": 0}
        given |= {"truncation": "auto", "instructions": "You tell of a fox."}
        shifted = 0
        for i in range(30):
            said = client.post("/v1/responses", json=given | {"input": f"{TURN} {i}"}).json()
            assert said["error"] is None, said
            given["previous_response_id"] = said["id"]
            shifted += said["hetero"]["shifted_tokens"]
            if shifted:
                break
        assert shifted
