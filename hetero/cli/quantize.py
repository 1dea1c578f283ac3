"""`hetero quantize`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero.backends.formats import WeightFormat
from hetero.cli.options import ModelArgument, progress_bar
from hetero.cli.quality_budget import TOKENS, QualityOption
from hetero.compiling.constants import DEFAULT_OUTLIERS
from hetero.errors import UserError
from hetero.terminal import printable

if TYPE_CHECKING:
    from hetero.compiling.precision import Tensors, TypeChoice
    from hetero.compiling.type_costs import GoalName, StepTimes
    from hetero.models.calibration_record import Calibration


class GoalChoice(StrEnum):
    """Values of --objective."""

    BYTES = "bytes"
    PROMPT = "prompt"
    DECODE = "decode"


GoalOption = Annotated[
    GoalChoice | None,
    typer.Option(
        "--objective",
        help="With --quality: the fewest bytes, or the least predicted time.",
        show_default=GoalChoice.BYTES.value,
    ),
]
TimesOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="PROFILE",
        help="With --quality: what predicts times, a file or a shipped name.",
        show_default="this machine's",
    ),
]


WORTH_SAYING = 1e-4


def quantize_command(
    model: ModelArgument,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory to write; of --quality a .gguf file.")
    ],
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="What to store; several: w8a8,w4a16.",
            show_default=WeightFormat.W4A16.value,
        ),
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="A text like those of the model's use: 4 bits, w8a8.")
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(min=32, help="Read this much of it.")] = TOKENS,
    quality: QualityOption = None,
    objective: GoalOption = None,
    profile: TimesOption = None,
    outliers: Annotated[
        str | None,
        typer.Option(
            metavar="WHICH",
            help="w8a8: matmuls that keep a shadow: a share, none, all, or paper.",
            show_default=DEFAULT_OUTLIERS,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier output of this command.")
    ] = False,
) -> None:
    """Quantise MODEL once, into a directory that loads by memory mapping.

    With --quality into a GGUF file: the types whose KL divergence from MODEL stays below it that
    take the fewest bytes or the least time.
    """
    from hetero.backends.formats import WeightFormat
    from hetero.backends.host.folders import expand_user
    from hetero.compiling.calibration import calibrated_together
    from hetero.models import open_model
    from hetero.models.calibration_record import OutlierChoice
    from hetero.models.quantized import check_destination, save

    if quality is not None:
        if weights is not None or outliers is not None:
            raise UserError("--quality chooses types itself: leave out --weights and --outliers")
        goal = objective or GoalChoice.BYTES
        asked = (model, out, calibrate, calibration_tokens)
        write_within(quality, *asked, goal=goal, profile=profile, overwrite=overwrite)
        return
    for option, value in (("objective", objective), ("profile", profile)):
        if value is not None:
            raise UserError(f"--{option} is for --quality: give --quality KL too, or leave it out")
    first, *others = stored_formats(weights or WeightFormat.W4A16)
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
        check_destination(expand_user(out).resolve(), overwrite=overwrite)
        given = (model, calibrate, calibration_tokens)
        with progress_bar("calibrating") as advance:
            source, also = calibrated_together(
                [first, *others], *given, advance, outliers=outliers or DEFAULT_OUTLIERS
            )
    with progress_bar("quantising") as advance:
        save(source, out, name=loaded.name, progress=advance, overwrite=overwrite, also=also)
    size = sum(path.stat().st_size for path in out.iterdir())
    stored = " and ".join([first, *others])
    print(f"{out}: {printable(loaded.name)} as {stored}, {size / 2**20:.1f} MiB")
    if source.calibration is not None:
        print(shadows(source.calibration))
    if loaded.weights.mtp is not None:
        print("the model's head for multi-token prediction is left out of the copy")
    for kind, error in loaded.weights.requantised().items():
        print(f"{printable(kind)} was quantised again: relative error {error:.3f} (measured)")


def write_within(
    budget: float,
    model: str,
    out: Path,
    calibrate: Path | None,
    limit: int,
    *,
    goal: GoalChoice,
    profile: str | None,
    overwrite: bool,
) -> None:
    """Write a GGUF file whose divergence from MODEL on a text is within a budget.

    Raises `UserError` and `ModelError`.
    """
    from hetero.backends.host.folders import expand_user
    from hetero.cli.quality_budget import check_budget, search, types_of, with_text
    from hetero.cli.tables import show_or_print
    from hetero.compiling.precision import measured_kl, open_tensors
    from hetero.models.gguf import GgufFile
    from hetero.models.gguf.requantising import PREDICTED, check_copy, write_copy
    from hetero.models.gguf.tensors import INPUTS, INT8

    text = check_budget(budget, calibrate)
    loaded, tensors = open_tensors(model)
    file, target = tensors.weights.file, expand_user(out).resolve()
    check_copy(file, target, overwrite=overwrite)
    name: GoalName = goal.value
    given = with_text((loaded, tensors), text, limit, (name,))
    searched = search(budget, given, (name,), profile)
    choice = searched.precision.choice
    entries: dict[str, float | str] = {PREDICTED: choice.kl}
    entries |= {INPUTS: INT8} if choice.int8 else {}
    with progress_bar("quantising") as advance:
        write_copy(file, target, choice.kinds, entries, advance)
    measured, tokens = measured_kl(tensors, choice, GgufFile(target), given.text.unseen)
    types = ", ".join(f"{count} {name}" for name, count in types_of(tensors, choice).items())
    print(f"{out}: {choice.nbytes / 2**20:.1f} MiB ({types})")
    if choice.int8:
        print(
            "it is computed with --weights gguf-a8 by default: inputs of matmuls are rounded to "
            "int8 for all types of at most 6 bits"
        )
    if choice.gap > WORTH_SAYING:
        what = "bytes are" if goal is GoalChoice.BYTES else "time is"
        print(f"its {what} at most {choice.gap:.2%} above the least")
    by = None if name == "bytes" else name
    show_or_print(searched.precision.table(tensors.weight_count, by))
    print(
        f"predicted KL {choice.kl:.3g}, measured {measured:.3g} nats a token over {tokens} tokens "
        "that were not used to choose"
    )
    if (times := searched.times) is not None:
        print(times_against(times, tensors, choice))


def times_against(times: StepTimes, tensors: Tensors, choice: TypeChoice) -> str:
    """Return a line on the predicted times of a choice, and of the file that it is made of."""
    from hetero.compiling.type_costs import PROMPT_TOKENS

    own = {name: kinds[0] for name, kinds in tensors.options.items()}
    before = {x: times.seconds(x, own, False) for x in times.layouts}
    devices = " + ".join(choice.devices["prompt"]).upper()
    return (
        f"predicted time: a prompt of {PROMPT_TOKENS} tokens in "
        f"{1e3 * choice.seconds['prompt']:.1f} ms on {devices} (as it was "
        f"{1e3 * before['prompt']:.1f}), a token of an answer in "
        f"{1e3 * choice.seconds['decode']:.2f} ms ({1e3 * before['decode']:.2f})"
    )


def stored_formats(given: str) -> list[WeightFormat]:
    """Return the formats of --weights, the one with static scales first. Raises `UserError`."""
    names = [name.strip() for name in given.split(",")]
    if unknown := [name for name in names if name not in list(WeightFormat)]:
        raise UserError(
            f"--weights {unknown[0]!r} is not a format; choose one or two of "
            f"{', '.join(WeightFormat)}"
        )
    formats = sorted(map(WeightFormat, names), key=lambda x: not x.activations.static)
    if len({x.storage for x in formats}) < len(formats):
        raise UserError(
            f"--weights {given} names weights that are stored in one way twice; name each once"
        )
    return formats


def shadows(record: Calibration) -> str:
    """Return a line on the treatment of outliers."""
    worst = max(record.matmuls, key=lambda name: record.matmuls[name].error)
    hot = sum(x.hot for x in record.matmuls.values())
    return (
        f"static scales from {record.tokens} tokens: "
        f"{len(record.shadowed)} of {len(record.matmuls)} "
        f"matmuls keep a shadow, {hot} hot channels; largest relative error of an output "
        f"{record.matmuls[worst].error ** 0.5:.3f}, {worst} (measured)"
    )
