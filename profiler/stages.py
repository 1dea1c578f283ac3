"""Stage performance (paper section 3.2): sizes that the device pads to the same multiple."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

ROW_STAGES: Final = (16, 32, 64, 128, 256)
TOKEN_STAGES: Final = (8, 16, 32, 64)
BLOCKS: Final = (1, 2)


def find_stage(
    time_s: Callable[[int], float],
    candidates: Sequence[int],
    *,
    same: float = 0.03,
    step: float = 1.15,
) -> int:
    """Return the largest candidate A whose sizes form a stage; 1 if there is none.

    Sizes j·A + 1 and (j + 1)·A take the same time, j = 1 and 2, while the next stage takes visibly
    longer. Times are the same that differ by a share of `same`; from one stage to the next they
    rise by `step`.

    `time_s(size)` measures. A candidate below the true stage passes too where the stage is a
    multiple of it, a candidate above it fails, so candidates are tried from the smallest.
    """
    stage_size = 1
    for stage in sorted(candidates):
        if not all(_is_stage(time_s, stage, block, same) for block in BLOCKS):
            if stage_size > 1:
                break
            continue
        if time_s(2 * max(BLOCKS) * stage) > step * time_s(stage):
            stage_size = stage
    return stage_size


def _is_stage(time_s: Callable[[int], float], stage: int, block: int, same: float) -> bool:
    first, last = time_s(block * stage + 1), time_s((block + 1) * stage)
    return abs(first - last) <= same * last
