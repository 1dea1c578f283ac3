"""The `hetero` command line. Thin: parses, calls the library, prints."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from hetero.backends.errors import DeviceError
from hetero.benchmark import BenchOptions, peak_rss_bytes, run_benchmark
from hetero.cli_plan import plan_command
from hetero.cli_profile import register as register_profile_commands
from hetero.device_set import DeviceMode, FallbackWarning
from hetero.doctor import Finding, diagnose, list_devices
from hetero.errors import UserError
from hetero.generation import DeviceShare, GenerationResult
from hetero.llm import DEFAULT_MAX_TOKENS, LLM, SamplingOptions
from hetero.models import open_model
from hetero.models.quantized import save as save_quantized
from hetero.profiler.errors import ProfileError
from hetero.solver.plan import PlanError

app = typer.Typer(
    name="hetero",
    help="Run language models on the GPU and the NPU of one chip, together.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
register_profile_commands(app)
app.command("plan")(plan_command)
stderr = Console(stderr=True)
# Typer carries its own copy of Click or uses the installed one, depending on its version; this is
# the base of every complaint about what was typed, in either.
UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])


class DeviceChoice(StrEnum):
    """Values of --device."""

    HETERO = "hetero"
    GPU = "gpu"
    NPU = "npu"
    AUTO = "auto"


class WeightChoice(StrEnum):
    """Values of --weights."""

    W4A16 = "w4a16"
    W4A8 = "w4a8"
    W8A16 = "w8a16"
    F16 = "f16"
    F32 = "f32"


class OutputFormat(StrEnum):
    """Values of bench -o."""

    MD = "md"
    JSON = "json"
    CSV = "csv"


ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A directory, `demo` or `random:NAME`."),
]
DeviceOption = Annotated[DeviceChoice, typer.Option("--device", help="What computes.")]
GpuOption = Annotated[str, typer.Option("--gpu", help="GPU backend.")]
NpuOption = Annotated[str, typer.Option("--npu", help="NPU backend.")]
WeightsOption = Annotated[WeightChoice, typer.Option("--weights", help="Weights and activations.")]
PlanOption = Annotated[Path | None, typer.Option("--plan", help="An execution plan (JSON).")]
ContextOption = Annotated[
    int | None, typer.Option("--max-seq-len", min=1, help="Longest prompt plus answer, tokens.")
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopKOption = Annotated[int, typer.Option("--top-k", help="Keep the k likeliest; 0: all.")]
TopPOption = Annotated[float, typer.Option("--top-p", help="Keep this much probability.")]
MinPOption = Annotated[float, typer.Option("--min-p", help="Keep what is this likely or more.")]
PenaltyOption = Annotated[float, typer.Option("--repetition-penalty", help="1: none.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")]
StopOption = Annotated[list[str] | None, typer.Option("--stop", help="Ends the answer.")]
StatsOption = Annotated[bool, typer.Option("--stats", help="Print speeds and placement.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Last line of stdout is JSON.")]


@app.command()
def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT")],
    max_tokens: MaxTokensOption = DEFAULT_MAX_TOKENS,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    repetition_penalty: PenaltyOption = 1.0,
    seed: SeedOption = None,
    stop: StopOption = None,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Use the chat template.")] = False,
    device: DeviceOption = DeviceChoice.HETERO,
    gpu: GpuOption = "auto",
    npu: NpuOption = "auto",
    weights: WeightsOption = WeightChoice.W4A16,
    plan: PlanOption = None,
    max_seq_len: ContextOption = None,
    stats: StatsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Go on from PROMPT; the text streams to stdout."""
    sampling = SamplingOptions(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    with _open(model, device, gpu, npu, weights, plan, max_seq_len) as llm:
        ended: list[GenerationResult] = []
        stream = llm.stream(
            prompt, max_tokens=max_tokens, stop=stop or (), chat=chat, on_end=ended, **sampling
        )
        for piece in stream:
            if not as_json:
                print(piece.text, end="", flush=True)
        if not as_json:
            print(flush=True)
        if stats:
            _print_stats(ended[0])
        if as_json:
            print(json.dumps(_result_json(llm, ended[0])), flush=True)


@app.command("chat")
def chat_command(
    model: ModelArgument,
    max_tokens: MaxTokensOption = DEFAULT_MAX_TOKENS,
    temperature: TemperatureOption = 0.7,
    top_k: TopKOption = 40,
    top_p: TopPOption = 0.95,
    min_p: MinPOption = 0.0,
    repetition_penalty: PenaltyOption = 1.0,
    seed: SeedOption = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    device: DeviceOption = DeviceChoice.HETERO,
    gpu: GpuOption = "auto",
    npu: NpuOption = "auto",
    weights: WeightsOption = WeightChoice.W4A16,
    max_seq_len: ContextOption = None,
) -> None:
    """Talk with MODEL in the terminal. End with an empty line, Ctrl-D or `/exit`."""
    messages: list[dict[str, str]] = []
    if system:
        messages.append({"role": "system", "content": system})
    with _open(model, device, gpu, npu, weights, None, max_seq_len) as llm:
        stderr.print("Type a message; an empty line, Ctrl-D or /exit ends.", style="dim")
        for line in _typed_lines():
            messages.append({"role": "user", "content": line})
            result = _print_answer(
                llm,
                messages,
                max_tokens,
                SamplingOptions(
                    temperature=temperature,
                    top_k=top_k,
                    top_p=top_p,
                    min_p=min_p,
                    repetition_penalty=repetition_penalty,
                    seed=seed,
                ),
            )
            messages.append({"role": "assistant", "content": result.text})


@app.command()
def quantize(
    model: ModelArgument,
    out: Annotated[Path, typer.Option("--out", help="Directory to write.")],
    weights: WeightsOption = WeightChoice.W4A16,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier output of this command.")
    ] = False,
) -> None:
    """Quantise MODEL once, into a directory that loads by memory mapping."""
    loaded = open_model(model, weights=weights.value)
    with _progress("quantising") as advance:
        save_quantized(loaded.weights, out, name=loaded.name, progress=advance, overwrite=overwrite)
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {loaded.name} as {weights.value}, {size / 2**20:.1f} MiB")


@app.command()
def bench(
    model: ModelArgument,
    prompt_tokens: Annotated[int, typer.Option("-p", min=1, help="Prompt tokens.")] = 256,
    decode_tokens: Annotated[int, typer.Option("-n", min=0, help="Decoded tokens.")] = 64,
    rounds: Annotated[int, typer.Option("-r", min=1, help="Rounds.")] = 5,
    device: Annotated[
        list[DeviceChoice] | None, typer.Option("--device", help="Repeat to compare.")
    ] = None,
    gpu: GpuOption = "auto",
    npu: NpuOption = "auto",
    weights: WeightsOption = WeightChoice.W4A16,
    output: Annotated[OutputFormat, typer.Option("-o", help="Format.")] = OutputFormat.MD,
) -> None:
    """Measure prefill (pp) and decode (tg) speed; several --device take turns in one run."""
    modes: tuple[DeviceMode, ...] = tuple(d.value for d in device or [DeviceChoice.HETERO])
    options = BenchOptions(
        prompt_tokens=prompt_tokens,
        decode_tokens=decode_tokens,
        rounds=rounds,
        devices=tuple(dict.fromkeys(modes)),
        gpu=gpu,
        npu=npu,
        weights=weights.value,
    )
    with stderr.status("loading") as status:
        report = run_benchmark(model, options, note=status.update)
    match output:
        case OutputFormat.MD:
            print(report.to_markdown())
        case OutputFormat.JSON:
            print(report.to_json())
        case OutputFormat.CSV:
            print(report.to_csv())


@app.command()
def devices(as_json: JsonOption = False) -> None:
    """List what can compute here."""
    _print_findings(list_devices(), as_json, ("found", "missing"))


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Run a small operation on every device; PASS or FAIL with the reason and the remedy."""
    findings = diagnose()
    _print_findings(findings, as_json, ("PASS", "FAIL"))
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(version("hetero"))
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options before the command."""
    _State.debug = debug


class _State:
    """Options that hold for the whole process."""

    debug = False


def main(arguments: list[str] | None = None) -> None:
    """Entry point: exit codes 0, 1 (doctor), 2 (the user can mend it), 130 (Ctrl-C)."""
    warnings.showwarning = _show_warning
    _State.debug = False
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an old code page must not end an answer
    try:
        code = app(args=arguments, standalone_mode=False)
    except UsageError as error:
        message = cast("typer.BadParameter", error).format_message()
        if message:  # none where the help was printed instead
            print(f"hetero: {message} (see `hetero --help`)", file=sys.stderr)
        code = 2
    except BrokenPipeError:
        # The reader went away (`| head`): leave without a second complaint at shutdown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except (UserError, PlanError, ProfileError, DeviceError, OSError) as error:
        if _State.debug:
            raise
        print(f"hetero: {error}", file=sys.stderr)
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        print("\ninterrupted", file=sys.stderr)
        code = 130
    raise SystemExit(code or 0)


def profile_main() -> None:
    """Entry point of `hetero-profile`, short for `hetero profile`."""
    main(["profile", *sys.argv[1:]])


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, FallbackWarning) or _State.debug:
        print(f"hetero: warning: {message}", file=sys.stderr)


def _open(
    model: str,
    device: DeviceChoice,
    gpu: str,
    npu: str,
    weights: WeightChoice,
    plan: Path | None,
    max_seq_len: int | None,
) -> LLM:
    with _progress("loading") as advance:
        return LLM(
            model,
            device=device.value,
            gpu=gpu,
            npu=npu,
            weights=weights.value,
            plan=str(plan) if plan is not None else None,
            max_seq_len=max_seq_len,
            progress=advance,
        )


@contextmanager
def _progress(what: str) -> Iterator[Any]:
    """A progress bar on stderr, gone when done; yields a function of (done, total)."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    silent = not stderr.is_terminal
    with Progress(*columns, console=stderr, transient=True, disable=silent) as bar:
        task = bar.add_task(what, total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance


def _typed_lines() -> Iterator[str]:
    while True:
        stderr.print("> ", end="", style="bold")
        line = sys.stdin.readline().strip() if sys.stdin else ""  # None: started without one
        if not line or line == "/exit":
            return
        yield line


def _print_answer(
    llm: LLM, messages: list[dict[str, str]], max_tokens: int, sampling: SamplingOptions
) -> GenerationResult:
    ended: list[GenerationResult] = []
    tokens = llm.encode_chat(messages)
    for piece in llm.stream(tokens, max_tokens=max_tokens, chat=True, on_end=ended, **sampling):
        print(piece.text, end="", flush=True)
    print(flush=True)
    return ended[0]


def _result_json(llm: LLM, result: GenerationResult) -> dict[str, Any]:
    stats = result.stats
    return {
        "text": result.text,
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "finish_reason": result.finish_reason,
        "ttft_s": stats.ttft_s,
        "prefill_tokens_per_s": stats.prefill_tokens_per_s,
        "decode_tokens_per_s": stats.decode_tokens_per_s,
        "placement": {
            kind: {"ops": share.ops, "busy_s": share.busy_s}
            if isinstance(share, DeviceShare)
            else share
            for kind, share in stats.placement.items()
        },
        "device": llm.devices.mode,
        "gpu": llm.devices.name("gpu"),
        "npu": llm.devices.name("npu"),
        "plan_id": llm.plan.plan_id,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def _print_stats(result: GenerationResult) -> None:
    stats = result.stats
    table = Table(title="measured on this machine", show_header=False)
    table.add_row("prompt", f"{stats.prompt_tokens} tokens")
    table.add_row("answer", f"{stats.completion_tokens} tokens, {result.finish_reason}")
    table.add_row("time to first token", f"{stats.ttft_s * 1e3:.1f} ms")
    table.add_row("prefill", f"{stats.prefill_tokens_per_s:.1f} tokens/s")
    table.add_row("decode", f"{stats.decode_tokens_per_s:.1f} tokens/s")
    for kind, share in stats.placement.items():
        if isinstance(share, DeviceShare):
            table.add_row(kind, f"{share.ops} operations, busy {share.busy_s * 1e3:.1f} ms")
        else:
            table.add_row(kind, Text(share))
    table.add_row("peak memory", f"{peak_rss_bytes() / 2**20:.0f} MiB")
    stderr.print(table)


def _print_findings(findings: list[Finding], as_json: bool, words: tuple[str, str]) -> None:
    if as_json:
        print(json.dumps([vars(finding) for finding in findings]))
        return
    for finding in findings:
        word = words[0] if finding.ok else words[1]
        print(f"{word:8}{finding.kind:4} {finding.name:8} {finding.detail}")
        if not finding.ok and finding.remedy:
            print(f"{'':13}remedy: {finding.remedy}")


if __name__ == "__main__":
    main()
