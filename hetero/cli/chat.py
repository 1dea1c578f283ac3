"""`hetero chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from hetero.backends.host.folders import data_folder, expand_user
from hetero.cli.options import (
    AnswerFlags,
    EngineFlags,
    ModelArgument,
    SpeculationFlags,
    StatsOption,
    SystemOption,
    WaitOption,
    WholeOption,
    expanded,
    finish_preparing,
    open_llm,
    shown,
    stderr,
)
from hetero.errors import UserError
from hetero.terminal import answer_text

if TYPE_CHECKING:
    from prompt_toolkit.history import History

    from hetero.generation.conversation import Conversation
    from hetero.generation.llm import LLM
    from hetero.generation.options import GenerateOptions


@expanded
def chat_command(
    model: ModelArgument,
    system: SystemOption = None,
    session: Annotated[
        Path | None, typer.Option(help="Go on from this file, and save to it after every turn.")
    ] = None,
    *,
    answer: AnswerFlags,
    engine: EngineFlags,
    speculation: SpeculationFlags,
    wait_for_plan: WaitOption = False,
    whole_caches: WholeOption = False,
    stats: StatsOption = False,
) -> None:
    """Talk with MODEL in the terminal; Ctrl-C stops an answer, Ctrl-D or /exit ends."""
    from hetero.generation.defaults import CHAT_SAMPLING, model_sampling
    from hetero.generation.options import read_options

    options: GenerateOptions = {**answer.arguments(), "speculative": speculation.speculative}
    given = answer.sampling()
    read_options({**options, **given})
    opening = {**engine.arguments(), **speculation.arguments(), "whole_caches": whole_caches}
    opening["wait_for_plan"] = wait_for_plan or answer.seed is not None  # to be repeated
    with open_llm(model, **opening) as llm:
        options = {**options, **(model_sampling(llm.model.source) or CHAT_SAMPLING), **given}
        talk = Talk(llm, llm.conversation(system=system), options, session, stats=stats)
        talk.begin()
        for line in lines():
            if not talk.take(line):
                break
        finish_preparing(llm)


HISTORY_FILE: Final = "chat-history"


ALIASES: Final = {"/bye": "/exit", "/quit": "/exit", "/?": "/help"}


class SlashCommand(NamedTuple):
    """A command that begins with a slash; `run` returns whether the chat continues."""

    arguments: str
    help: str
    run: Callable[[str], bool]


class AnswerPrinter:
    """Prints an answer as it comes; its thoughts are dim on a terminal."""

    def __init__(self, llm: LLM) -> None:
        from hetero.serving.answer_parser import AnswerForm, AnswerParser

        tokenizer = llm.model.tokenizer
        form = AnswerForm.of(tokenizer)
        prompt = llm.encode_chat([{"role": "user", "content": "x"}])
        self.shown_tokens = form.shown if form.thoughts or form.channels else frozenset[int]()
        self._parser = AnswerParser(form, closes=form.begun_in(prompt, tokenizer))
        self._dims, self._begun = sys.stdout.isatty(), False

    def write(self, text: str, *, last: bool = False) -> None:
        """Print the text that an answer grew by."""
        for piece in self._parser.feed(text, last=last):
            thought = piece.part.kind == "thought"
            if piece.begins and self._begun:
                print("\n")
            self._begun = True
            printed = answer_text(piece.text)
            if thought and self._dims:
                printed = f"\x1b[2m{printed}\x1b[22m"
            print(printed, end="", flush=True)


class Talk:
    """A conversation and its commands."""

    def __init__(
        self,
        llm: LLM,
        conversation: Conversation,
        options: GenerateOptions,
        session: Path | None,
        *,
        stats: bool = False,
    ) -> None:
        self._llm, self._options, self._session, self._every = llm, options, session, stats
        self.conversation = conversation
        self._commands = {
            "/help": SlashCommand("", "show this", self._help),
            "/clear": SlashCommand("", "forget what was said", self._clear),
            "/undo": SlashCommand("", "forget the last question and its answer", self._undo),
            "/system": SlashCommand("[TEXT]", "set the system message, or show it", self._system),
            "/stats": SlashCommand("", "speeds and placement of the last answer", self._stats),
            "/save": SlashCommand("FILE", "write the conversation, for --session FILE", self._save),
            "/exit": SlashCommand("", "end (also Ctrl-D)", lambda _: False),
        }

    def begin(self) -> None:
        """Continue the session, if there is one; print how to talk."""
        from rich.text import Text

        if self._session is not None and self._session.exists():
            self.conversation.load(self._session)
            visible = [m for m in self.conversation.messages if m["role"] in ("user", "assistant")]
            _note(f"{self._session}: going on after {len(visible)} messages")
            for message in visible[-2:]:
                stderr().print(
                    Text("> " if message["role"] == "user" else "", style="bold"),
                    shown(str(message.get("content", "")).strip()),
                    style="dim",
                    sep="",
                )
        _note("Type a message; /help lists commands, Ctrl-D or /exit ends.")

    def take(self, line: str) -> bool:
        """Handle a message or a command; return whether the chat continues."""
        name, _, rest = line.partition(" ")
        name = ALIASES.get(name, name)
        if name in self._commands:
            try:
                return self._commands[name].run(rest.strip())
            except (UserError, OSError) as error:
                _complain(error)
                return True
        if name.startswith("/") and name[1:].isalpha():
            _note(f"{name} is no command; /help lists them")
            return True
        self._answer(line)
        return True

    def _answer(self, line: str) -> None:
        """Answer one turn.

        The text before Ctrl-C is kept in the conversation; a message that is too long is reported,
        and the conversation continues.
        """
        conversation, dropped = self.conversation, self.conversation.dropped
        texts: list[str] = []
        try:
            printer = AnswerPrinter(self._llm)
            options: GenerateOptions = {**self._options, "shown_tokens": printer.shown_tokens}
            for delta in conversation.stream(line, **options):
                texts.append(delta.text)
                printer.write(delta.text)
            printer.write("", last=True)
        except UserError as error:
            _complain(error)
            return
        except KeyboardInterrupt:
            self._keep(line, "".join(texts))
            return
        print(flush=True)
        if conversation.dropped > dropped:
            _note("(the context is full: the oldest messages are left out)")
        if self._every:
            self._stats("")
        self._save_session()

    def _keep(self, line: str, answer: str) -> None:
        """Add a stopped answer to the conversation, as far as it went."""
        print(flush=True)
        if not answer.strip():
            _note("(stopped before the answer began; the message is forgotten)")
            return
        self.conversation.messages += [
            {"role": "user", "content": line},
            {"role": "assistant", "content": answer},
        ]
        _note("(stopped; what was said is kept)")
        self._save_session()

    def _save_session(self) -> None:
        if self._session is not None and self.conversation.messages:
            self.conversation.save(self._session)

    def _help(self, _: str) -> bool:
        texts = {f"{name} {c.arguments}": c.help for name, c in self._commands.items()}
        texts |= {"Ctrl-C": "stop an answer", "Esc, Enter": "another line of the same message"}
        for name, text in texts.items():
            _note(f"  {name:16}{text}")
        return True

    def _clear(self, _: str) -> bool:
        messages = self.conversation.messages
        messages[:] = [m for m in messages if m["role"] == "system"]
        self._save_session()
        _note("(forgotten; the system message stays)")
        return True

    def _undo(self, _: str) -> bool:
        from rich.text import Text

        messages = self.conversation.messages
        questions = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if not questions:
            _note("(there is nothing to undo)")
            return True
        text = str(messages[questions[-1]]["content"])
        del messages[questions[-1] :]
        self._save_session()
        stderr().print(Text("(forgotten: "), shown(text), Text(")"), style="dim", sep="")
        return True

    def _system(self, text: str) -> bool:
        messages = self.conversation.messages
        there = bool(messages) and messages[0]["role"] == "system"
        if not text:
            _note(str(messages[0]["content"]) if there else "(there is no system message)")
            return True
        messages[: int(there)] = [{"role": "system", "content": text}]
        self._save_session()
        return True

    def _stats(self, _: str) -> bool:
        from hetero.cli.generate import print_stats

        if self.conversation.last is None:
            _note("(there is no answer yet)")
        else:
            print_stats(self._llm, self.conversation.last)
        return True

    def _save(self, name: str) -> bool:
        if not name:
            raise UserError("/save needs the name of a file, such as /save talk.session")
        self.conversation.save(expand_user(name))
        _note(f"{name} is written; go on from it with --session {name}")
        return True


def _note(text: str) -> None:
    stderr().print(shown(text), style="dim")


def _complain(error: Exception) -> None:
    stderr().print(shown(f"hetero: {error}"), soft_wrap=True)


def lines() -> Iterator[str]:
    """Yield typed lines that are not empty; a terminal has editing and history."""
    read = _typed() if sys.stdin is not None and sys.stdin.isatty() else _piped()
    return (line for line in read if line)


def _piped() -> Iterator[str]:
    if sys.stdin is None:  # started without one
        return
    while line := sys.stdin.readline():
        yield line.strip()


class _StoppedError(Exception):
    """The error of Ctrl-C while a line was typed."""


def _kept_history(path: Path) -> History:
    from prompt_toolkit.history import FileHistory

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):  # a full disk costs a line of the history, not the talk
                super().store_string(string)

    return Kept(str(path))


def _typed() -> Iterator[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    history: History = InMemoryHistory()
    folder = data_folder()
    with suppress(OSError):  # a home that cannot be written: this talk has a history all the same
        folder.mkdir(parents=True, exist_ok=True)
        (folder / HISTORY_FILE).open("a").close()
        history = _kept_history(folder / HISTORY_FILE)
    # Answers go to stdout, which may be a file; what is typed belongs to the terminal.
    session: PromptSession[str] = PromptSession(
        history=history,
        key_bindings=keys,
        output=create_output(stdout=sys.stderr),
        # A KeyboardInterrupt out of its event loop would leave that unfinished.
        interrupt_exception=_StoppedError,
    )
    warned = False
    while True:
        try:
            line = session.prompt("> ").strip()
        except EOFError:
            return
        except (KeyboardInterrupt, _StoppedError):
            if warned:
                raise KeyboardInterrupt from None
            warned = True
            _note("(Ctrl-D or /exit ends; Ctrl-C again, too)")
            continue
        warned = False
        yield line
