"""`hetero profile --soc CHIP`: a profile of an absent chip, from the schedules of its compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hetero.backends.qnn import hexagon
from hetero.backends.registry import find
from hetero.backends.snapdragon import CHIPS
from hetero.errors import UserError
from hetero.models import model_spec
from hetero.profiler.compiled import SHAPES, compiler_profile
from hetero.profiler.grid import Shape, model_pairs
from hetero.profiler.options import DEFAULT_BUDGET_S, Event
from hetero.profiler.records import DeviceProfile


def is_compiled_for(soc: str) -> bool:
    """Return whether `--soc` names a chip that the compiler knows, and not just the profile.

    Raises `UserError` for a chip whose compiler is not installed.
    """
    if soc.lower() not in CHIPS:
        return False
    if find("qnn").missing_packages():
        raise UserError(
            f"--soc {soc} asks Qualcomm's compiler, which is not installed: "
            f"{find('qnn').install_hint}"
        )
    return not hexagon.present()


def compiled_profile(
    soc: str,
    out: str | Path | None = None,
    *,
    model: str | None = None,
    budget_s: float = DEFAULT_BUDGET_S,
    progress: Callable[[Event], None] | None = None,
) -> DeviceProfile:
    """Return the profile of a chip, `compiler-predicted`, written to `out` or `SOC.json`.

    `model` takes exactly that model's matmuls instead of common sizes, and the parts of them that
    row cuts need. What the budget has no time for is predicted from the rest.
    """
    shapes: tuple[tuple[int, int], ...] = SHAPES
    if model is not None:
        matmuls = model_spec(model).matmuls
        shapes = model_pairs(Shape(matmul.name, matmul.n, matmul.k) for matmul in matmuls)
    profile = compiler_profile(soc.lower(), shapes, budget_s=budget_s, progress=progress)
    profile.save(Path(out) if out is not None else Path(f"{soc}.json"))
    return profile
