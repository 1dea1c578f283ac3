"""What `hetero quantize` is asked and says."""

from __future__ import annotations

from hetero.backends.formats import WeightFormat
from hetero.errors import UserError
from hetero.models.calibration_record import Calibration


def stored_formats(asked: str) -> list[WeightFormat]:
    """Return the formats of --weights, the one with static scales first. Raises `UserError`."""
    names = [name.strip() for name in asked.split(",")]
    if unknown := [name for name in names if name not in list(WeightFormat)]:
        raise UserError(
            f"--weights {unknown[0]!r} is not a format; choose one or two of "
            f"{', '.join(WeightFormat)}"
        )
    found = sorted(map(WeightFormat, names), key=lambda x: not x.activations.static)
    if len({x.storage for x in found}) < len(found):
        raise UserError(
            f"--weights {asked} names weights that are stored in one way twice; name each once"
        )
    return found


def shadows(found: Calibration) -> str:
    """Return a line on what was done about outliers."""
    worst = max(found.matmuls, key=lambda name: found.matmuls[name].error)
    hot = sum(x.hot for x in found.matmuls.values())
    return (
        f"static scales from {found.tokens} tokens: {len(found.shadowed)} of {len(found.matmuls)} "
        f"matmuls keep a shadow, {hot} hot channels; largest relative error of an output "
        f"{found.matmuls[worst].error ** 0.5:.3f}, {worst} (measured)"
    )
