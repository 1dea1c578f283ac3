"""Whether a step computes in chains what it computes call by call: seen once, when a model is first
opened, because a program of many kernels is compiled as no trial of a driver has compiled it.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Final

from hetero.backends.errors import DeviceError
from hetero.backends.memory import Panels
from hetero.errors import FallbackWarning
from hetero.runtime.executor import Executor
from hetero.runtime.kernels import Devices
from hetero.runtime.step import Step

POISON: Final = -1e30


def chain_is_right(step: Step, devices: Devices, executor: Executor) -> bool:
    """Run a bound step that is fed both ways, and compare its logits bit by bit; true where it has
    no chains. A failure is that of the next step, too, which tells it.
    """
    chained = step.chained(devices)
    if chained is step or step.logits is None:
        return True
    found = []
    with suppress(DeviceError):
        for each in (step, chained):
            _poison(step)
            executor.run(each)
            found.append(_bits(step))
        if found[0] == found[1]:
            return True
        warnings.warn(
            "decoding runs call by call because the same kernels in one launch (a chain) give "
            "other values with this driver: please report it with `hetero doctor --json`",
            FallbackWarning,
            stacklevel=2,
        )
    return False


def _poison(step: Step) -> None:
    operand = step.logits
    for part in operand.parts if isinstance(operand, Panels) else (operand,):
        assert part is not None
        part.array[:] = POISON


def _bits(step: Step) -> list[bytes]:
    operand = step.logits
    parts = operand.parts if isinstance(operand, Panels) else (operand,)
    return [part.array.tobytes() for part in parts if part is not None]
