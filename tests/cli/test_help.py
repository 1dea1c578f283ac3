"""The help, the habits of other tools, and where a prompt may come from."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer

from hetero.cli import app as cli
from hetero.cli.commands import COMMANDS as LISTED
from hetero.cli.examples import COMMANDS
from tests.support.helpers import Command

NAMES = sorted(LISTED)
WIDTHS = (60, 80, 200)
JSON = ("--json", "--device", "npu", "--max-tokens", "4", "--temperature", "0")


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("name", ["", *NAMES])
def test_help_fits_the_terminal_and_is_short(
    command: Command, monkeypatch: pytest.MonkeyPatch, name: str, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = command(*name.split(), "-h").stdout
    lines = shown.splitlines()
    assert max(map(len, lines)) <= columns
    assert len(lines) < (120 if columns < 80 else 100)
    assert "…" not in shown.replace("COMMAND …", "")


@pytest.mark.parametrize("name", NAMES)
def test_help_has_every_option_whole_with_its_choices(
    command: Command, monkeypatch: pytest.MonkeyPatch, name: str, built: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    shown = " ".join(command(name, "--help").stdout.split())
    for parameter in built.get_command(None, name).params:
        if getattr(parameter, "hidden", False):  # an old name
            continue
        for option in (*parameter.opts, *parameter.secondary_opts):
            assert option in shown or parameter.param_type_name == "argument"
        if parameter.help:
            assert " ".join(parameter.help.split()) in shown
    if name in ("generate", "chat", "eval"):
        assert "(hetero, gpu, npu, auto) [default: " in shown


def test_defaults_are_shown(command: Command) -> None:
    shown = " ".join(command("generate", "--help").stdout.split())
    for text in ("[default: auto]", "[default: MODEL's own, or w4a16]", "[default: 256]",
                 "[default: adapt]", "Sampling", "Devices and plans", "Output"):  # fmt: skip
        assert text in shown


def test_every_example_can_be_parsed(built: Any) -> None:
    """By the command itself, whose function is not called."""
    import shlex

    for name, text in COMMANDS.items():
        if name not in NAMES:
            continue
        for line in text.strip().splitlines():
            words = shlex.split(line.split("#")[0].split("| ")[-1])
            assert words[:2] == ["hetero", name]
            context = built.get_command(None, name).make_context(name, words[2:])
            assert context.params


def test_python_m_hetero() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hetero", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip()


OPENING = (
    "device", "gpu", "npu", "cpu", "profile", "plan", "weights", "max_seq_len", "sync", "strategy",
    "max_gpu_share", "memory_budget", "adapt", "order", "kv", "whole_caches",
)  # fmt: skip


def test_what_opens_a_model_has_the_same_options_everywhere(built: Any) -> None:
    """Those of `LLM`, and how an answer is drawn, under one name and with one text."""
    from hetero.generation.llm import LLM
    from hetero.generation.options import SamplingOptions

    named = set(inspect.signature(LLM.__init__).parameters)
    assert named - set(OPENING) == {
        "self", "model", "progress", "prompt_lengths", "first_prompt", "draft_model",
        "draft_device", "wait_for_plan", "experts",
    }  # fmt: skip
    found = {
        command: {p.name: p for p in built.get_command(None, command).params}
        for command in ("generate", "chat", "serve", "bench", "eval")
    }
    drawing = {*SamplingOptions.__annotations__, "stop", "max_tokens", "context_shift", "keep"}
    lacking = {
        "generate": set(),
        "chat": set(),
        "serve": {"whole_caches", *drawing},  # always whole; of each request
        "bench": {"max_seq_len", *drawing},  # what -p and -n need
    }
    for command, without in lacking.items():
        assert {*OPENING, *drawing} - set(found[command]) == without, command
    repeated = {"device", "sync", "strategy", "weights", "kv", "max_tokens"}
    others = (
        "speculative",
        "draft_model",
        "draft_device",
        "wait_for_plan",
        "experts",
        "stats",
        "system",
    )
    for name in (*OPENING, *drawing, *others, "as_json"):
        texts = {
            (found[x][name].help, tuple(found[x][name].opts))
            for x in found
            if name in found[x] and not (x in ("bench", "eval") and name in repeated)
        }
        assert len(texts) == 1, texts


def test_panels_are_in_one_order_and_required_options_say_so(command: Command) -> None:
    for name in NAMES:
        lines = command(name, "--help").stdout.splitlines()
        titles = [line.split(" ─")[0] for line in lines if "──" in line]
        order = ["Arguments", "Options", "Sampling", "Devices and plans", "Output", "Examples"]
        assert titles == [title for title in order if title in titles]
    text = command("compile", "--help").stdout
    assert re.search(r"--soc CHIP +Such as sm8650 \(Snapdragon 8 Gen 3\)\. \[required\]", text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("genrate", "demo"), "there is no `hetero genrate`: did you mean generate?"),
        (("sync",), "did you mean sync-bench?"),
        (("nonsense",), "`hetero --help` lists the commands"),
        (("generate", "demo", "a", "b"), "goes in quotes (see `hetero generate --help`)"),
        (("plan", "--objective", "x", "y"), "'x' is not one of"),
        (("--nope",), "--nope (see `hetero --help`)"),
    ],
)
def test_what_was_mistyped(command: Command, words: tuple[str, ...], said: str) -> None:
    done = command(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Value error" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "demo"), "use `hetero generate MODEL PROMPT`"),
        (("pull", "x"), "hf download OWNER/NAME"),
        (("list",), "use `hetero models`"),
        (("perplexity",), "use `hetero eval MODEL --text FILE`"),
    ],
)
def test_names_of_other_tools_are_told_ours(
    command: Command, words: tuple[str, ...], said: str
) -> None:
    done = command(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_help_and_version_are_words_too(command: Command) -> None:
    assert command("help", "plan").stdout == command("plan", "--help").stdout
    assert command("version").stdout == command("--version").stdout


def test_completion_can_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"_HETERO_COMPLETE": "complete_bash", "COMP_WORDS": "hetero gene", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0] = 'hetero'\n"
         "from hetero.cli.app import app; app(prog_name='hetero')"],
        capture_output=True, text=True, check=False, env={**__import__("os").environ, **env},
    )  # fmt: skip
    assert done.stdout.split() == ["generate"], done.stderr


@pytest.mark.full
def test_a_prompt_comes_from_the_command_a_file_or_stdin(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Tell me a story\n", encoding="utf-8")
    ways = (
        command("generate", "demo", "Tell me a story", *JSON),
        command("generate", "demo", *JSON, stdin="Tell me a story\n"),
        command("generate", "demo", "-", *JSON, stdin="Tell me a story"),
        command("generate", "demo", "--file", str(file), *JSON),
    )
    answers = [json.loads(way.stdout) for way in ways]
    assert {a["text"] for a in answers} == {answers[0]["text"]}
    assert {a["prompt_tokens"] for a in answers} == {answers[0]["prompt_tokens"]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("Hello", "--file", "{file}"), "there are two prompts"),
        (("--file", "{bytes}"), "is no text in UTF-8"),
        (("--file", "{none}"), "none"),
        (("x", "--system", "Be short", "--raw"), "leave out --raw"),
        ((), "the prompt is empty"),
    ],
)
def test_prompts_that_cannot_be(
    command: Command, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "file").write_text("Hi", encoding="utf-8")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xfa")
    given = [w.format(**{x: tmp_path / x for x in ("file", "bytes", "none")}) for w in words]
    done = command("generate", "demo", "--device", "npu", *given)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.full
def test_the_chat_template_is_the_default_where_a_model_has_one(command: Command) -> None:
    """With --raw, or --echo, the answer goes on from the prompt; --system goes before it."""
    told = {
        way: json.loads(command("generate", "demo", "One day", *JSON, *way).stdout)
        for way in ((), ("--chat",), ("--raw",), ("--echo",), ("--system", "Be short"))
    }
    assert [told[way]["chat"] for way in told] == [True, True, False, False, True]
    assert told[()]["text"] == told["--chat",]["text"]
    shown = command("generate", "demo", "One day", *JSON[1:]).stdout
    assert shown == told[()]["text"].lstrip() + "\n"
    assert told["--echo",]["text"] == "One day" + told["--raw",]["text"]
    tokens = [told[way]["prompt_tokens"] for way in (("--raw",), (), ("--system", "Be short"))]
    assert tokens == sorted(set(tokens))


@pytest.mark.full
def test_a_model_is_sampled_as_its_authors_say(command: Command, tmp_path: Path) -> None:
    """In a chat, unless an option says otherwise; a raw text goes on greedily."""
    from hetero.generation.defaults import model_sampling
    from hetero.models import DEMO_DIRECTORY

    assert model_sampling(DEMO_DIRECTORY) == {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
    words = ("generate", "demo", "Tell me a story", "--device", "npu", "--max-tokens", "40")
    drawn = {command(*words, "--seed", str(seed)).stdout for seed in range(3)}
    assert len(drawn) > 1
    greedy = {command(*words, "--temperature", "0", "--seed", str(s)).stdout for s in range(3)}
    raw = {command(*words, "--raw", "--seed", str(seed)).stdout for seed in range(3)}
    assert len(greedy) == len(raw) == 1


@pytest.mark.parametrize(
    ("document", "found"),
    [
        ({}, {}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, {"temperature": 0.0}),
        ({"top_p": 0.9}, {}),
        ({"temperature": 0.6, "top_p": None}, {"temperature": 0.6, "top_k": 50}),
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 50}),
        ({"do_sample": True, "top_k": 20, "repetition_penalty": 1.1},
         {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.1}),
    ],
)  # fmt: skip
def test_generation_config(tmp_path: Path, document: dict[str, Any], found: dict[str, Any]) -> None:
    from hetero.errors import ModelError
    from hetero.generation.defaults import model_sampling

    (tmp_path / "generation_config.json").write_text(json.dumps(document), encoding="utf-8")
    assert model_sampling(tmp_path) == found
    wrong = {"do_sample": True, "temperature": "hot"}
    (tmp_path / "generation_config.json").write_text(json.dumps(wrong), encoding="utf-8")
    with pytest.raises(ModelError, match="temperature must be a number"):
        model_sampling(tmp_path)


def test_an_answer_that_is_cut_by_the_context_says_so(command: Command) -> None:
    done = command("generate", "demo", "One day", "--raw", "--device", "npu", "--max-seq-len", "8")
    assert "fill the context of 8 tokens (--max-seq-len; " in done.stderr


def test_a_trace_is_told_where_it_lies(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    done = command("generate", "demo", "Hi", "--device", "npu", "--max-tokens", "2", "--trace",
                   str(path))  # fmt: skip
    assert f"{path} is written: open it at ui.perfetto.dev" in done.stderr


def test_nothing_on_a_closed_stdin_is_told(monkeypatch: pytest.MonkeyPatch, built: Any) -> None:
    monkeypatch.setattr(cli, "app", built)
    monkeypatch.setattr("sys.stdin", None)
    said = StringIO()
    monkeypatch.setattr("sys.stderr", said)
    with pytest.raises(SystemExit):
        cli.main(["generate", "demo"])
    assert "the prompt is missing" in said.getvalue()
    assert isinstance(cli.app, typer.core.TyperGroup)


def test_a_bar_has_no_count_before_it_knows_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from hetero.cli import options

    said = StringIO()
    console = Console(file=said, force_terminal=True, width=80)
    monkeypatch.setattr(options, "stderr", lambda: console)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with options.progress_bar("loading") as advance:
        pass
    assert "/?" not in said.getvalue()
    with options.progress_bar("loading") as advance:
        advance(2, 5)
    assert "2/5" in said.getvalue()


def test_without_a_terminal_progress_is_a_line_each_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hetero.cli import options

    now_s = 1000.0
    monkeypatch.setattr("hetero.cli.options.time.monotonic", lambda: now_s)
    with options.progress_bar("tensors alone") as advance:
        for done in range(1, 6):
            now_s += 31.0
            advance(done, 5)
    assert capsys.readouterr().err.splitlines() == [
        "hetero: tensors alone: 2 of 5 after 1 min",
        "hetero: tensors alone: 4 of 5 after 2 min",
    ]
