"""The `hetero` command line. Thin: parses, calls the library, prints."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, cast

import typer

from hetero.backends.errors import DeviceError
from hetero.backends.formats import WeightFormat
from hetero.cli.compile import compile_command
from hetero.cli.doctor import Finding, diagnose, list_devices
from hetero.cli.evaluate import eval_command
from hetero.cli.generate import chat_command, generate_command
from hetero.cli.options import (
    DeviceChoice,
    GpuOption,
    JsonOption,
    ModelArgument,
    NpuOption,
    ProfileOption,
    SyncChoice,
    WeightsChoice,
    WeightsOption,
    parse_strategy,
    progress_bar,
    stderr,
)
from hetero.cli.plan import plan_command
from hetero.cli.profile import register as register_profile_commands
from hetero.compiling.calibration import calibrated_together
from hetero.errors import FallbackWarning, UserError, one_sentence
from hetero.measuring.benchmark import BenchOptions, run_benchmark
from hetero.measuring.sync_bench import MOST_ROUNDS, run_sync_bench
from hetero.models import default_weights, open_model
from hetero.models.calibration_record import DEFAULT_OUTLIERS, Calibration, OutlierChoice
from hetero.models.quantized import check_destination
from hetero.models.quantized import save as save_quantized
from hetero.placement.device_set import DeviceMode
from hetero.profiler.errors import ProfileError, ProfileWarning
from hetero.solver.plan import PlanError
from hetero.solver.request import MOST_TOKENS
from hetero.terminal import printable

app = typer.Typer(
    name="hetero",
    help="Run language models on the GPU and the NPU of one chip, together.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
register_profile_commands(app)
app.command("generate")(generate_command)
app.command("chat")(chat_command)
app.command("eval")(eval_command)
app.command("plan")(plan_command)
app.command("compile")(compile_command)
# Typer carries its own copy of Click or uses the installed one, depending on its version; this is
# the base of every complaint about what was typed, in either.
UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])


class OutputFormat(StrEnum):
    """Values of bench -o."""

    MD = "md"
    JSON = "json"
    CSV = "csv"


@app.command()
def quantize(
    model: ModelArgument,
    out: Annotated[Path, typer.Option("--out", help="Directory to write.")],
    weights: Annotated[
        str, typer.Option("--weights", help="What to store; several: w8a8,w4a16.")
    ] = WeightFormat.W4A16.value,
    calibrate: Annotated[
        Path | None,
        typer.Option("--calibrate", help="A text like those of the model's use: 4 bits, w8a8."),
    ] = None,
    calibration_tokens: Annotated[
        int, typer.Option("--calibration-tokens", min=32, help="Read this much of it.")
    ] = 4096,
    outliers: Annotated[
        str | None,
        typer.Option(
            "--outliers", help="w8a8: matmuls with a shadow: 15%, none, all, paper.  [default: 15%]"
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier output of this command.")
    ] = False,
) -> None:
    """Quantise MODEL once, into a directory that loads by memory mapping."""
    first, *others = _stored(weights)
    if outliers is not None:
        OutlierChoice.parse(outliers)
        if calibrate is None or first is not WeightFormat.W8A8:
            raise UserError(
                "--outliers is for activations with static scales; give --weights w8a8 and "
                "--calibrate TEXT too"
            )
    static = calibrate is not None and first.activations.static
    loaded = open_model(model, weights="f32" if static else first.value)
    source, also = loaded.weights, [open_model(model, weights=x.value).weights for x in others]
    if calibrate is not None:
        check_destination(Path(out).expanduser().resolve(), overwrite=overwrite)
        asked = (model, calibrate, calibration_tokens)
        with progress_bar("calibrating") as advance:
            source, also = calibrated_together(
                [first, *others], *asked, advance, outliers=outliers or DEFAULT_OUTLIERS
            )
    with progress_bar("quantising") as advance:
        save_quantized(
            source, out, name=loaded.name, progress=advance, overwrite=overwrite, also=also
        )
    size = sum(path.stat().st_size for path in out.iterdir())
    stored = " and ".join([first, *others])
    print(f"{out}: {printable(loaded.name)} as {stored}, {size / 2**20:.1f} MiB")
    if source.calibration is not None:
        print(_shadows(source.calibration))
    for kind, error in loaded.weights.requantised().items():
        print(f"{printable(kind)} was quantised again: relative error {error:.3f} (measured)")


def _stored(asked: str) -> list[WeightFormat]:
    """The formats of --weights, the one with static scales first. Raises `UserError`."""
    names = [name.strip() for name in asked.split(",")]
    if unknown := [name for name in names if name not in list(WeightFormat)]:
        raise UserError(
            f"--weights {unknown[0]!r} is not a format; choose of: {', '.join(WeightFormat)}"
        )
    found = sorted(map(WeightFormat, names), key=lambda x: not x.activations.static)
    if len({x.storage for x in found}) < len(found):
        raise UserError(
            f"--weights {asked} names weights that are stored in one way twice; name each once"
        )
    return found


def _shadows(found: Calibration) -> str:
    """A line on what was done about outliers."""
    worst = max(found.matmuls, key=lambda name: found.matmuls[name].error)
    hot = sum(x.hot for x in found.matmuls.values())
    return (
        f"static scales from {found.tokens} tokens: {len(found.shadowed)} of {len(found.matmuls)} "
        f"matmuls keep a shadow, {hot} hot channels; largest relative error of an output "
        f"{found.matmuls[worst].error ** 0.5:.3f}, {worst} (measured)"
    )


@app.command()
def bench(
    model: ModelArgument,
    prompt_tokens: Annotated[
        int, typer.Option("-p", min=1, max=MOST_TOKENS, help="Prompt tokens.")
    ] = 256,
    decode_tokens: Annotated[
        int, typer.Option("-n", min=0, max=MOST_TOKENS, help="Decoded tokens.")
    ] = 64,
    rounds: Annotated[int, typer.Option("-r", min=1, max=1000, help="Rounds.")] = 5,
    device: Annotated[
        list[DeviceChoice] | None, typer.Option("--device", help="Repeat to compare.")
    ] = None,
    gpu: GpuOption = "auto",
    npu: NpuOption = "auto",
    weights: WeightsOption = None,
    strategy: Annotated[
        list[str] | None, typer.Option("--strategy", help="Force one; repeat to compare.")
    ] = None,
    sync: Annotated[
        list[SyncChoice] | None, typer.Option("--sync", help="How to wait; repeat to compare.")
    ] = None,
    profile: ProfileOption = None,
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
        weights=default_weights(model) if weights in (None, WeightsChoice.AUTO) else weights.value,
        strategies=tuple(parse_strategy(name) for name in dict.fromkeys(strategy or ())),
        syncs=tuple(dict.fromkeys(s.value for s in sync or [SyncChoice.FAST])),
        profile=profile,
    )
    with stderr.status("loading") as status:
        report = run_benchmark(model, options, note=status.update)
    match output:
        case OutputFormat.MD:
            print(printable(report.to_markdown()))
        case OutputFormat.JSON:
            print(report.to_json())
        case OutputFormat.CSV:
            print(printable(report.to_csv()))


@app.command("sync-bench")
def sync_bench(
    gpu: GpuOption = "auto",
    rounds: Annotated[
        int | None,
        typer.Option(
            "-r", min=5, max=MOST_ROUNDS, help="Waits of each kind (default: a second of each)."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """What a wait costs here: each method's added latency and CPU time."""
    with stderr.status("measuring"):
        report = run_sync_bench(gpu=gpu, rounds=rounds)
    print(report.to_json() if as_json else printable(report.to_markdown()))


@app.command()
def devices(as_json: JsonOption = False) -> None:
    """List what can compute here."""
    _print_findings(list_devices(), as_json, ("found", "missing"))


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Run a small operation on every device; PASS or FAIL with the reason and the remedy."""
    findings = diagnose()
    _print_findings(findings, as_json, ("PASS", "FAIL"))
    if not all(finding.ok for finding in findings if finding.needed):
        raise typer.Exit(1)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(version("hetero"))
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks, and what compilers say.")
    ] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options before the command."""
    _State.debug = debug
    if debug:  # what compilers say, and other details, on standard error
        logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
        logging.getLogger("hetero").setLevel(logging.DEBUG)


class _State:
    """Options that hold for the whole process."""

    debug = False
    ended_by: int = signal.SIGINT


@contextmanager
def _ended_cleanly() -> Iterator[None]:
    """SIGTERM, and a terminal that is closed, end a command as Ctrl-C does; the second one ends it
    at once.
    """
    _State.ended_by = signal.SIGINT
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> None:
    _State.ended_by = number
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> None:
    """Entry point: exit codes 0, 1 (doctor), 2 (the user can mend it), 130 (Ctrl-C), 143 (SIGTERM)
    and 129 (the terminal was closed).
    """
    with _ended_cleanly():
        _main(arguments)


def _main(arguments: list[str] | None) -> None:
    warnings.showwarning = _show_warning
    _State.debug = False
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an old code page must not end an answer
    try:
        code = app(args=arguments, standalone_mode=False)
        if code == 128 + signal.SIGINT:  # how newer versions of Typer say it
            raise KeyboardInterrupt
    except UsageError as error:
        message = cast("typer.BadParameter", error).format_message()
        if message:  # none where the help was printed instead
            print(f"hetero: {one_sentence(message)} (see `hetero --help`)", file=sys.stderr)
        code = 2
    except BrokenPipeError:
        _silence_stdout()
        code = 0
    except SystemExit as ended:
        # Where the reader went away (`| head`), Typer and Rich end with 1.
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        _silence_stdout()
        code = 0 if ended.code == 1 else ended.code
    except (UserError, PlanError, ProfileError, DeviceError, OSError) as error:
        if _State.debug:
            raise
        print(f"hetero: {one_sentence(str(error))}", file=sys.stderr)
        code = 2
    except MemoryError as error:
        if _State.debug:
            raise
        why = str(error) or "the system has no more"
        print(
            f"hetero: out of memory: {one_sentence(why)}: close other programs, or ask for less",
            file=sys.stderr,
        )
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        with suppress(OSError):  # the terminal may be gone
            print("\ninterrupted", file=sys.stderr)
        code = 128 + _State.ended_by
    raise SystemExit(code or 0)


def _silence_stdout() -> None:
    """The reader went away: leave without a second complaint at shutdown."""
    sys.stdout = sys.__stdout__
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def profile_main() -> None:
    """Entry point of `hetero-profile`, short for `hetero profile`."""
    main(["profile", *sys.argv[1:]])


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, FallbackWarning | ProfileWarning) or _State.debug:
        print(f"hetero: warning: {one_sentence(str(message))}", file=sys.stderr)


def _print_findings(findings: list[Finding], as_json: bool, words: tuple[str, str]) -> None:
    if as_json:
        print(json.dumps([vars(finding) for finding in findings]))
        return
    for finding in findings:
        word = words[0] if finding.ok else words[1]
        print(f"{word:8}{finding.kind:4} {finding.name:12} {printable(finding.detail)}")
        if not finding.ok and finding.remedy:
            print(f"{'':13}remedy: {finding.remedy}")


if __name__ == "__main__":
    main()
