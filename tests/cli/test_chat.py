"""`hetero chat` as a person uses it: in a terminal, and what its commands do to a conversation."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero import LLM
from hetero.cli import chat as chat_module
from hetero.cli.chat import AnswerPrinter, Talk
from hetero.generation.options import GenerateOptions
from hetero.serving.answer_parser import AnswerForm
from tests.support.helpers import Command

pytest.importorskip("termios")  # a terminal of POSIX

from tests.support.terminals import Terminal

CHAT = ("chat", "demo", "--device", "npu", "--max-tokens", "30", "--temperature", "0")
READY = "\x1b[?2004h"  # bracketed paste is on: the editor takes keys
CLOSED = "\x1b[?2004l"  # and off again: a line was taken
GREEDY: GenerateOptions = {"max_tokens": 30, "temperature": 0.0}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="npu", max_seq_len=400) as opened:
        yield opened


def talk(llm: LLM, session: Path | None = None) -> Talk:
    return Talk(llm, llm.conversation(), GREEDY, session)


def said(one: Talk) -> list[str]:
    return [str(message["content"]) for message in one.conversation.messages]


def press(terminal: Terminal, keys: str) -> None:
    """Keys, then what comes of them, up to when the editor takes keys again: earlier ones are the
    terminal's own.
    """
    closed = terminal.text.count(CLOSED)
    terminal.type(keys)
    terminal.wait_for(CLOSED, times=closed + 1)
    end = terminal.text.rindex(CLOSED)
    while READY not in terminal.text[end:]:
        terminal.wait_for(READY, times=terminal.text.count(READY) + 1)


@pytest.mark.full
def test_lines_are_edited_and_remembered_in_a_terminal(tmp_path: Path) -> None:
    env = {"XDG_DATA_HOME": str(tmp_path)}
    with Terminal(*CHAT, env=env) as terminal:
        terminal.wait_for(READY)
        terminal.type("/nonsens\x1b[D\x1b[D")  # two to the left: the letter goes before "ns"
        press(terminal, "e\r")
        assert "/nonseens is no command" in terminal.text
        press(terminal, "\x1b[A\r")  # up: the same again
        press(terminal, "\x03")
        assert "Ctrl-C again, too" in terminal.text
        terminal.type("\x04")
        assert terminal.end() == 0
    assert "Traceback" not in terminal.text
    assert "/nonseens" in (tmp_path / "hetero" / "chat-history").read_text()


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = tmp_path / "talk"
    one, pieces = talk(llm, session), []

    def interrupted(text: str) -> str:
        pieces.append(text)
        if len(pieces) == 6:
            signal.raise_signal(signal.SIGINT)
        return text

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(chat_module, "answer_text", interrupted)
            assert one.take("Tell me a story.")
    finally:
        signal.signal(signal.SIGINT, before)
    whole = llm.chat([{"role": "user", "content": "Tell me a story."}], **GREEDY).text
    question, kept = said(one)
    assert question == "Tell me a story."
    assert kept.strip()
    assert whole.startswith(kept)
    assert len(kept) < len(whole)
    again = talk(llm, session)
    again.begin()
    assert said(again) == [question, kept]
    assert again.take("And then?")
    assert len(said(again)) == 4


def test_the_session_is_saved_after_every_turn(llm: LLM, tmp_path: Path) -> None:
    session = tmp_path / "talk"
    one = talk(llm, session)
    for turns in (1, 2):
        one.take("Tell me a story.")
        again = talk(llm, session)
        again.begin()
        assert said(again) == said(one)
        assert len(said(again)) == 2 * turns


def test_commands(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = talk(llm)
    assert one.take("/stats")
    assert one.take("/system Be short.")
    assert one.take("Tell me a story.")
    assert one.take("And then?")
    assert len(said(one)) == 5
    one.take("/undo")
    assert len(said(one)) == 3
    one.take(f"/save {tmp_path / 'kept'}")
    one.take("/clear")
    assert said(one) == ["Be short."]
    one.take("/system Be long.")
    assert said(one) == ["Be long."]
    one.take("/undo")
    one.take("/save")
    one.take("/help")
    one.take("/stats")
    shown = " ".join(capsys.readouterr().err.split())
    for text in ("no answer yet", "forgotten: And then?", "nothing to undo", "/save needs the name",
                 "/undo forget the last question", "tokens/s"):  # fmt: skip
        assert text in shown
    assert not one.take("/exit")
    assert not one.take("/bye")
    again = talk(llm, tmp_path / "kept")
    again.begin()
    assert len(said(again)) == 3


def test_an_empty_line_does_not_end_the_talk(command: Command) -> None:
    done = command(*CHAT, stdin="\n\nTell me a story.\n\n/nope\n")
    assert done.returncode == 0
    assert len(done.stdout.split()) > 5
    assert not done.stdout.startswith(" ")
    assert "/nope is no command" in done.stderr


def test_a_path_in_a_message_is_no_command(command: Command) -> None:
    done = command(*CHAT, stdin="/etc/hosts is a file\n")
    assert "no command" not in done.stderr
    assert done.stdout.strip()


def test_a_full_disk_costs_a_line_of_the_history(tmp_path: Path) -> None:
    pytest.importorskip("prompt_toolkit")
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no such device")
    history = chat_module._kept_history(full)
    history.append_string("said")
    assert history.get_strings() == ["said"]
    kept = chat_module._kept_history(tmp_path / "history")
    kept.append_string("said")
    assert "+said" in (tmp_path / "history").read_text()


def test_thoughts_are_dim_on_a_terminal(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    form = AnswerForm(thoughts=(("<think>", "</think>"),))
    monkeypatch.setattr(AnswerForm, "of", lambda _tokenizer: form)
    for terminal in (True, False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_one=terminal: is_one)
        printer = AnswerPrinter(llm)
        for text in ("<th", "ink>\nHm", ".</think>", "\n\nWell", "."):
            printer.write(text)
        printer.write("", last=True)
        text = capsys.readouterr().out
        plain = text.replace("\x1b[2m", "").replace("\x1b[22m", "")
        assert plain == "Hm.\n\nWell."
        assert ("\x1b[2mHm\x1b[22m" in text) == terminal
