"""Checks that fused steps compute the same as unfused ones.

They are checked once, when a model is first opened, because no self-test of a driver has compiled a
program of that many kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from hetero.backends.errors import DeviceError, KernelBuildError
from hetero.backends.optional import SupportsPrewarm
from hetero.backends.protocol import parts_of
from hetero.errors import FallbackWarning
from hetero.runtime.executor import Executor
from hetero.runtime.handover import publish
from hetero.runtime.kernels import Devices
from hetero.runtime.kv.context import Context
from hetero.runtime.pool import ActivationPool
from hetero.runtime.step import Step

POISON: Final = -1e30


def fused_results_match(
    steps: Sequence[Step],
    contexts: Sequence[Context],
    pool: ActivationPool,
    devices: Devices,
    executor: Executor,
    vocab_size: int,
    max_seq_len: int,
) -> bool:
    """Run the steps of a context that have fused launches both ways, and compare their logits.

    They run on tokens after its text, and the logits are compared bit by bit; where they differ,
    the next start does so again. A device that fails here fails in the next step, too, which
    reports it. They write after the text, where the next step writes again; a prompt's step does
    not run where there is a text, for which rows of a sliding window may have to move. False where
    a full context has no room for it, or another thread still writes.
    """
    pairs = []
    for step in steps:
        ran, compiled = fused(step, devices, compiles=True)
        if not compiled:
            return False
        if ran is not step:
            pairs.append((step, ran))
    if not pairs:
        return True
    if any(x.gate is not None or x.cached >= max_seq_len for x in contexts):
        return False
    if any(x.cached and x.cache.layout.states for x in contexts):
        return False  # the second run would start from other states
    positions, bases = [x.cached for x in contexts], [x.cache.base for x in contexts]
    with suppress(DeviceError):
        for step, ran in pairs:
            if step.phase == "decode":
                pool.feed_rows(_tokens(len(contexts), vocab_size), positions, bases)
            elif any(positions) or step.tokens > max_seq_len:
                continue
            else:
                pool.feed(_tokens(step.tokens, vocab_size), 0)
            if _logits(step, executor, devices) != _logits(ran, executor, devices):
                break
        else:
            return True
        _warn(
            devices,
            "give other values with this driver: please report it with `hetero doctor --json`",
        )
    return False


def _tokens(count: int, vocab_size: int) -> list[int]:
    """Return different tokens; the first ones may stand for nothing: zeros are always right."""
    half = vocab_size // 2
    return [half + i % max(half, 1) for i in range(count)]


def fused(step: Step, devices: Devices, *, compiles: bool) -> tuple[Step, bool]:
    """Return the fused step, for runs that are not timed call by call.

    It is the step itself and False, with a warning, where the driver's compiler fails on the
    program of many kernels, as it did on none.
    """
    try:
        return step.fused(devices, compiles=compiles), True
    except KernelBuildError as error:
        _warn(devices, f"are not compiled by this driver: {error}")
        return step, False


def _warn(devices: Devices, why: str) -> None:
    """Warn, and let the next start try again."""
    for device in devices.values():
        if isinstance(device, SupportsPrewarm):
            device.discard_prewarm()
    warnings.warn(
        f"steps run call by call because the same kernels in one launch (a chain) {why}",
        FallbackWarning,
        stacklevel=3,
    )


def _logits(step: Step, executor: Executor, devices: Devices) -> list[bytes]:
    """Return the bits of a run's logits, written over poison."""
    assert step.logits is not None
    parts = parts_of(step.logits)
    for part in parts:
        part.array[:] = POISON
    for device in devices.values():
        publish(device, parts)
    executor.run(step)
    return [part.array.tobytes() for part in parts]
