"""`--quality` of `hetero quantize` and `hetero plan`: types of tensors under a budget."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from hetero.cli.options import progress_bar
from hetero.errors import UserError

if TYPE_CHECKING:
    from hetero.compiling.precision import Precision, SplitText, Tensors, TypeChoice
    from hetero.compiling.type_costs import GoalName, StepTimes
    from hetero.models import LoadedModel
    from hetero.placement.planning import ProfileLike
    from hetero.solver.execution_plan import ExecutionPlan
    from hetero.solver.quality_points import QualityPoint

TOKENS = 4096  # of a text that are read
QualityOption = Annotated[
    float | None,
    typer.Option(
        metavar="KL", help="Nats a token that may be lost: a type for each tensor of a GGUF file."
    ),
]


ALL_GOALS: Final[tuple[GoalName, ...]] = ("bytes", "prompt", "decode")


class TextAndTensors(NamedTuple):
    """A model's tensors and a text, in which nothing was found wrong."""

    loaded: LoadedModel
    tensors: Tensors
    text: SplitText


class Searched(NamedTuple):
    """The types that were chosen for a model, and the times that are predicted of any."""

    tensors: Tensors
    precision: Precision
    times: StepTimes | None


def check_budget(budget: float, calibrate: Path | None) -> Path:
    """Return the text. Raises `UserError` without one, and for a budget that is none."""
    if not 0 < budget < math.inf:
        raise UserError(f"--quality must be a number of nats above 0, such as 0.01, got {budget:g}")
    if calibrate is None:
        raise UserError("--quality is measured on a text: give --calibrate TEXT too")
    return calibrate


def with_text(
    model: tuple[LoadedModel, Tensors], text: Path, limit: int, goals: Sequence[GoalName]
) -> TextAndTensors:
    """Return what `search` works on. Raises `UserError` for a text that cannot be used."""
    from hetero.compiling.precision import SplitText

    loaded, tensors = model
    count = tensors.alone_count(int8=any(x != "bytes" for x in goals))
    return TextAndTensors(loaded, tensors, SplitText.of(loaded, text, limit, count))


def opened(model: str, text: Path, limit: int) -> TextAndTensors:
    """Return what `with_quality` works on. Raises `UserError` and `ModelError`."""
    from hetero.compiling.precision import open_tensors

    return with_text(open_tensors(model), text, limit, ALL_GOALS)


def search(
    budget: float, given: TextAndTensors, goals: Sequence[GoalName], profile: ProfileLike
) -> Searched:
    """Measure losses on a text and choose types for each goal.

    Raises `UserError`, `ProfileError` and `PlanError`.
    """
    from hetero.compiling.precision import choose
    from hetero.compiling.type_costs import Goal
    from hetero.terminal.notices import notify

    loaded, tensors, parts = given
    times = _times(loaded, tensors, profile, needed=any(x != "bytes" for x in goals))
    wanted = [Goal(x, times) for x in goals]
    int8 = any(True in x.activations for x in wanted)
    path = tensors.weights.file.path
    if stored := tensors.quantised():
        notify(
            f"{path} is quantised ({', '.join(stored)}): --quality counts from what it holds, "
            "and not from the floats that it was made of"
        )
    for note in () if times is None else times.notes:
        notify(note)
    with progress_bar("tensors alone") as alone:
        losses = tensors.losses(parts.alone, alone, int8=int8)
    with progress_bar("together") as together:
        precision = choose(tensors, losses, parts.together, budget, together, wanted)
    return Searched(tensors, precision, times)


def _times(
    loaded: LoadedModel, tensors: Tensors, profile: ProfileLike, *, needed: bool
) -> StepTimes | None:
    """Return the times by a profile; where bytes alone count a notice says what has none."""
    from hetero.backends.formats import WeightFormat
    from hetero.placement.planning import spec_on
    from hetero.profiler.errors import ProfileError
    from hetero.solver.errors import PlanError
    from hetero.terminal.notices import notify

    spec, measured = spec_on(loaded.source or loaded.name, WeightFormat.GGUF_A16.value, profile)
    try:
        return tensors.step_times(spec, measured)
    except (ProfileError, PlanError) as error:
        if needed:
            raise
        notify(f"no times are predicted: {error}")
        return None


def types_of(tensors: Tensors, choice: TypeChoice) -> dict[str, int]:
    """Return how many tensors have each type, the most common first."""
    counts = Counter(x.name for x in tensors.kinds(choice.kinds).values())
    return dict(counts.most_common())


def with_quality(
    plan: ExecutionPlan, budget: float, given: TextAndTensors, profile: ProfileLike
) -> ExecutionPlan:
    """Return the plan with what a budget of quality buys.

    Raises `UserError`, `ProfileError` and `PlanError`.
    """
    from hetero.compiling.type_costs import CONTEXT, PROMPT_TOKENS
    from hetero.solver.quality_points import Quality

    searched = search(budget, given, ALL_GOALS, profile)
    precision = searched.precision
    quality = Quality(
        budget=budget,
        prompt_tokens=PROMPT_TOKENS,
        context=CONTEXT,
        choices=tuple(_point(searched, x, measured=False) for x in precision.choices),
        frontier=tuple(_point(searched, x, measured=True) for x in precision.frontier),
    )
    notes = (*plan.notes, *precision.refused)
    return plan.model_copy(update={"quality": quality, "notes": notes})


def _point(searched: Searched, choice: TypeChoice, *, measured: bool) -> QualityPoint:
    from hetero.solver.quality_points import QualityPoint

    return QualityPoint(
        name=choice.name,
        types=types_of(searched.tensors, choice),
        inputs="int8" if choice.int8 else "float",
        weight_bytes=choice.nbytes,
        kl=choice.kl,
        measured=measured,
        prompt_s=choice.seconds["prompt"],
        prompt_devices=choice.devices["prompt"],
        decode_s=choice.seconds["decode"],
        decode_devices=choice.devices["decode"],
    )
