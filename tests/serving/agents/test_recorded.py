"""Coding agents and the AI SDK, by the requests that they sent when the task was recorded.

`recorded/NAME.json` has the requests of OpenAI's Codex CLI 0.171, Claude Code 2.1 and the AI SDK 6
(`streamText` with `@ai-sdk/openai` and `@ai-sdk/openai-compatible`), with shortened texts and fewer
functions, and the ids that were in the answers, for which those of the new answers are put.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.serving.agents import events
from tests.serving.agents.assistant import Assistant
from tests.serving.agents.story import Turn, begin, check_prompts, weather

FOLDER = Path(__file__).with_name("recorded")
IDS = re.compile(r"(?:call|toolu|rs|msg|fc)_[0-9a-f]{24,}")


def shell(output: str, code: int, number: str, tokens: int) -> str:
    """A result of Codex's `exec_command`."""
    return (
        f"Chunk ID: {number}\nWall time: 0.0000 seconds\nProcess exited with code {code}\n"
        f"Original token count: {tokens}\nOutput:\n{output}"
    )


CODEX = [
    Turn(
        "Two files.",
        "I read both.",
        [("exec_command", {"cmd": "printf 18"}), ("exec_command", {"cmd": "cat Zürich.txt"})],
        [
            shell("18", 0, "0db750", 1),
            shell("cat: Zürich.txt: No such file or directory\n", 1, "761cac", 11),
        ],
    ),
    Turn(
        "The name is another.",
        "",
        [("exec_command", {"cmd": "printf 'a 😀'"})],
        [shell("a 😀", 0, "d3f06e", 2)],
    ),
    Turn("Both.", "Paris has 18 degrees, Zürich 21."),
]
CLAUDE = [
    Turn(
        "Two files.",
        "I read both.",
        [
            ("Bash", {"command": "printf 18", "description": "d"}),
            ("Read", {"file_path": "/home/me/work/Zürich.txt"}),
        ],
        ["18", "File does not exist. Note: your current working directory is /home/me/work."],
    ),
    Turn("The name is another.", "", [("Bash", {"command": "printf 'a 😀'"})], ["a 😀"]),
    Turn("Both.", "Paris has 18 degrees, Zürich 21."),
]
Sent = Callable[[str], list[events.Event]]
Expected = Callable[[Turn], list[events.Event]]
CLIENTS: list[tuple[str, list[Turn], Sent, Expected]] = [
    ("codex", CODEX, events.responses_sent, events.responses_of),
    ("claude", CLAUDE, events.messages_sent, events.messages_of),
    ("ai_openai", weather(), events.responses_sent, events.responses_of),
    ("ai_compatible", weather(), events.chat_sent, events.chat_of),
]


def _known(ids: dict[str, str], match: re.Match[str]) -> str:
    return ids[match[0]]


def exchange(assistant: Assistant, recorded: dict[str, Any]) -> list[str]:
    """Send the requests, and return what the server sent."""
    answers, known = list[str](), dict[str, str]()
    with assistant.server.client() as client:
        for request, old in zip(recorded["requests"], recorded["ids"], strict=True):
            body = IDS.sub(partial(_known, known), json.dumps(request))
            headers = {**recorded["headers"], "Content-Type": "application/json"}
            answer = client.post(recorded["path"], content=body, headers=headers)
            assert answer.status_code == 200, answer.text
            assert answer.headers["content-type"].startswith("text/event-stream")
            answers.append(answer.text)
            new = list(dict.fromkeys(IDS.findall(answer.text)))
            known |= zip(old, new, strict=True)
    return answers


@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "turns", "sent", "expected"), CLIENTS)
def test_a_recorded_client_works_through_the_task(
    scripted: Assistant, name: str, turns: list[Turn], sent: Sent, expected: Expected
) -> None:
    recorded = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    begin(scripted, turns)
    answers = exchange(scripted, recorded)
    for answer, turn in zip(answers, turns, strict=True):
        assert sent(answer) == expected(turn)
    counts = [events.usages(answer) for answer in answers]
    for before, (_, cached, _) in itertools.pairwise(counts):
        assert cached == before[0] + before[2]  # nothing that was computed is computed again
    first = check_prompts(scripted, turns)
    for function in {name for turn in turns for name, _ in turn.calls}:
        assert f'"name": "{function}"' in first
    assert "web_search" not in first  # which does not run here
