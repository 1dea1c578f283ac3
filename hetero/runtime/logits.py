"""Reads a step's logits, and checks that they are finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.memory import Tensor
from hetero.backends.protocol import Device, DeviceKind, parts_of
from hetero.errors import UserError
from hetero.runtime.control import ControlThread
from hetero.runtime.finite import all_finite, first_not_finite, norms_finite, not_finite
from hetero.runtime.handover import fetch, incoherent
from hetero.runtime.kv.context import Context
from hetero.runtime.pool import ActivationPool
from hetero.runtime.slot_refs import slot_of
from hetero.runtime.step import Step
from hetero.runtime.step_cache import StepCache

Logits: TypeAlias = npt.NDArray[np.float32]


class LogitsReader:
    """Reads the logits of the step that ran last. Owned by the control thread.

    `head_input` is the slot that the output head reads. With `static` scales codes are finite
    whatever they were made of, so that slot is checked as well; with `copies` (`--sync copy`) it
    would be in the GPU's memory alone, and is not. `sampled`: the last layers are computed for a
    prompt's last token alone.
    """

    def __init__(
        self,
        pool: ActivationPool,
        steps: StepCache,
        devices: Mapping[DeviceKind, Device],
        control: ControlThread,
        *,
        head_input: str,
        static: bool,
        copies: bool,
        sampled: bool,
    ) -> None:
        self._pool, self._steps, self._devices, self._control = pool, steps, devices, control
        self._head_input, self._static, self._copies = head_input, static, copies
        self._sampled = sampled

    def last(self, context: Context, step: Step) -> Logits:
        """Return the logits [vocab] of the last token, a view. Raises as `rows` does."""
        return self._checked(context, step, self._view(step, 1)[0])

    def rows(self, context: Context, step: Step) -> Logits:
        """Return a copy of the logits [tokens, vocab] of every token.

        Raises `DeviceError`, and discards the step's tokens, where a value is not finite.
        """
        return self._checked(context, step, self._view(step, step.tokens).copy())

    def inputs(self, context: Context, step: Step, *, every: bool) -> Logits:
        """Return a copy of what the output head reads of a prompt's step [rows, d].

        The rows are those of `every` token, or of the last. Raises as `rows` does.
        """
        if self._copies:
            raise UserError("--sync copy keeps hidden states from the host: choose another --sync")
        counts = self._pool.fed[: len(step.chunks)]
        first = 0 if every else len(counts) - 1
        parts = [self._input(step, i, count) for i, count in enumerate(counts) if i >= first]
        rows = np.concatenate(parts)
        return self._finite(context, step, rows if every else rows[-1:])

    def report(self, context: Context, step: Step) -> None:
        """Give the hidden states of a step's tokens to `Context.on_states`, if that is set.

        Those of the last token alone, if any, where the last layers were computed for no other.
        """
        every = not (self._sampled and step.phase == "prefill")
        if context.on_states is None or (step.logits is None and not every):
            return
        first = 0 if every else sum(self._pool.fed[: len(step.chunks)]) - 1
        context.on_states(context.cached + first, self.inputs(context, step, every=every))

    def of_contexts(self, step: Step, count: int) -> list[Logits | None]:
        """Return copies of the logits [vocab] of so many contexts; None where not finite."""
        logits = self._view(step, count).copy()
        checks_input = self._static and not self._copies
        head_input = self._input(step, 0, count) if checks_input else logits
        if all_finite(logits) and not checks_input:  # one look for all rows, mostly
            return list(logits)
        return [
            row
            if all_finite(row) and not (checks_input and not all_finite(head_input[i]))
            else None
            for i, row in enumerate(logits)
        ]

    def check_stream(self, context: Context, step: Step) -> None:
        """Check the input of the output head for the last token, which has seen all others.

        All tokens are checked where matmuls round activations to codes. Raises as `rows` does.
        """
        if self._copies:
            return
        last = len(step.chunks) - 1
        for chunk, count in enumerate(step.chunks):
            rows = self._input(step, chunk, count)
            if self._static and not norms_finite(rows):
                self._finite(context, step, rows)
            elif chunk == last:
                self._finite(context, step, rows[-1])

    def _input(self, step: Step, chunk: int, count: int) -> Logits:
        """Return what the output head reads [count, d] of a chunk, as the host sees it."""
        rows = self._pool[slot_of(self._head_input, chunk)].rows(0, count)
        if incoherent(self._devices) is not None:
            writer = next(
                launch.kind
                for launch in reversed(step.launches)
                if launch.chunk == chunk
                and any(x.buffer is rows.buffer for y in launch.outputs for x in parts_of(y))
            )
            fetch(self._devices[writer], [rows])
        return rows.array

    def _checked(self, context: Context, step: Step, logits: Logits) -> Logits:
        if self._static:
            self.check_stream(context, step)
        return self._finite(context, step, logits)

    def _finite(self, context: Context, step: Step, values: Logits) -> Logits:
        """Return the values, all finite.

        The error names the operation and the device that wrote the first value that is not.
        """
        if all_finite(values):
            return values
        context.rewind(int(self._pool["position"].array[0]))
        if step.signal is not None:
            rows = len(np.atleast_2d(values))
            step = self._steps.step(context, step.phase, step.tokens, rows, wait_values=False)
        with self._control.on_core():
            launch = first_not_finite(step, self._devices)
        raise not_finite(launch, self._devices)

    def _view(self, step: Step, rows: int) -> Logits:
        """Return logits [rows, vocab]: a view where they are contiguous."""
        logits = step.logits
        if isinstance(logits, Tensor):
            return logits.array[:rows]
        assert logits is not None
        if rows == 1 and logits.shape[0] == 1:  # one token's panels are contiguous
            return self._pool["logits"].array[:1]
        return logits.gather(rows)
