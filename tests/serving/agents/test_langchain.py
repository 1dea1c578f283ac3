"""LangChain's standard suite of chat models over both of OpenAI's APIs: all of it passes.

It brings plugins that every pytest next to it would load, so it is installed in a folder of the
cache, and run by a pytest of its own: `langchain_suite`.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import platformdirs
import pytest

from tests.serving.agents.assistant import Assistant

PINNED = ("langchain-tests==1.1.9", "langchain-openai==1.7.4", "langchain-core==1.8.3")
SUITE = Path(__file__).with_name("langchain_suite.py")
# Of the suite's tests: of pictures, sound and files, which no model here reads, and of one that
# plays recorded traffic back.
LEFT_OUT = {
    "test_audio_inputs", "test_image_inputs", "test_image_tool_message", "test_pdf_inputs",
    "test_pdf_tool_message", "test_stream_time",
}  # fmt: skip


def call(name: str, **arguments: Any) -> str:
    said = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{said}\n</tool_call>"


JOKE = {"setup": "Why do cats sit on keys?", "punchline": "To catch the mouse."}
SAYS = {  # words of a prompt, and what the model then says
    "What is 3 + 4": call("my_adder_tool", a=3, b=4),
    "<tool_response>": "That is what it is.",
    '"name": "magic_function_no_args"': call("magic_function_no_args"),
    '"name": "magic_function"': call("magic_function", input=3),
    '"name": "greeting_generator"': call("greeting_generator", answer_style="pirate"),
    '"name": "get_weather"': f"<think>\nA city.\n</think>\n\nI look.\n"
    f"{call('get_weather', location='San Francisco, CA')}",
    "你好啊集团": call("unicode_customer", customer_name="你好啊集团", description="Hello"),
    "こんにちは": call("unicode_customer", customer_name="こんにちは株式会社", description="Hello"),
    '"name": "Joke"': call("Joke", **JOKE),
    "no punchline": json.dumps({"setup": JOKE["setup"], "punchline": None}, separators=(",", ":")),
    "joke about cats": json.dumps(JOKE, separators=(",", ":")),
    "Think:": "<think>\n3 * 3 * 3.\n</think>\n\n27",
    "": "Hello! How are you?",
}


def python_with_suite() -> Path:
    """The Python of an environment that has the suite, made where there is none; else skips."""
    name = hashlib.sha256(" ".join(PINNED).encode()).hexdigest()[:8]
    folder = platformdirs.user_cache_path("hetero-tests") / f"langchain-{name}"
    python, made = folder / "bin" / "python", folder / "made"
    if not made.exists():
        make = ([sys.executable, "-m", "venv", "--clear", str(folder)],
                [str(python), "-m", "pip", "install", "--quiet", *PINNED])  # fmt: skip
        for command in make:
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
            if done.returncode:
                why = f"LangChain's suite cannot be installed: {done.stderr[-300:]}"
                if "langchain" in os.environ.get("HETERO_REQUIRE", "").split(","):
                    pytest.fail(f"{why} (HETERO_REQUIRE)")
                pytest.skip(why)
        made.touch()
    return python


@pytest.mark.full
def test_the_standard_suite_passes(scripted: Assistant, tmp_path: Path) -> None:
    python, report = python_with_suite(), tmp_path / "report.xml"
    scripted.script(SAYS)
    options = (  # clients are kept from test to test, so the tests have one event loop
        "--noconftest", "-c", os.devnull, "--rootdir", str(tmp_path), "--import-mode=importlib",
        "-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session",
        "-o", "asyncio_default_fixture_loop_scope=session",
        "-p", "no:cacheprovider", f"--junitxml={report}", "-q",
    )  # fmt: skip
    env = {**os.environ, "HETERO_URL": scripted.server.url, "HETERO_KEY": scripted.key}
    done = subprocess.run(
        [str(python), "-P", "-m", "pytest", *options, str(SUITE)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    skipped: dict[str, set[str]] = {"TestChatCompletions": set(), "TestResponses": set()}
    cases = list(ElementTree.parse(report).iter("testcase"))
    for case in cases:
        if case.find("skipped") is not None:
            skipped[case.attrib["classname"].rpartition(".")[2]].add(case.attrib["name"])
    assert skipped == {"TestChatCompletions": LEFT_OUT, "TestResponses": LEFT_OUT}
    assert len(cases) == 100
