"""Feeds and runs one step of one or several contexts, and accounts for what it took."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

from hetero.backends.host.clock import Clock
from hetero.backends.optional import SupportsQueueControl
from hetero.errors import UserError
from hetero.runtime.adaptive import Adapter
from hetero.runtime.attention_scores import rows_of
from hetero.runtime.control import ControlThread
from hetero.runtime.executor import Executor, OnDeviceBusy, nothing
from hetero.runtime.fused_check import fused, fused_results_match
from hetero.runtime.fused_prompts import FusedPrompts
from hetero.runtime.gpu_share import GpuShare, gpu_busy_s
from hetero.runtime.holes import TextPiece, shape_of
from hetero.runtime.kernels import Devices
from hetero.runtime.kv.cache_sync import Side
from hetero.runtime.kv.context import Context
from hetero.runtime.kv.layer_states import UNKNOWN
from hetero.runtime.pool import ActivationPool
from hetero.runtime.step import Step
from hetero.runtime.step_cache import StepCache
from hetero.runtime.trace import Trace
from hetero.runtime.usage import StepRun, Usage
from hetero.solver.plan import Phase, PrefillMode


class StepRunner:
    """Runs the steps of a cache on the devices that `use` names. Owned by the control thread.

    `trace` records steps where one was started; `gpu_share` pauses after steps where the GPU may
    only be busy for part of the time. `fuses`: steps run in fused launches, which `validate`
    switches off where the driver miscompiles them. `copied_bytes` were copied between the devices'
    memories so far. `watch` is called after a step of one context with its phase, tokens, the
    tokens before them, and its seconds.
    """

    def __init__(
        self, steps: StepCache, control: ControlThread, gpu_share: GpuShare | None, clock: Clock
    ) -> None:
        self.steps, self.control, self.gpu_share = steps, control, gpu_share
        self.executor = Executor(clock)
        self.trace: Trace | None = None
        self.copied_bytes = 0
        self.watch: Callable[[Phase, int, int, float], None] | None = None
        self.fuses = True
        self._timed = False
        self._last: weakref.ref[Step] | None = None
        self._last_run: StepRun | None = None
        self._loading_step: Step | None = None

    def use(
        self,
        devices: Devices,
        pool: ActivationPool,
        adapter: Adapter | None,
        fused_prompts: FusedPrompts,
    ) -> None:
        """Run the next steps on these devices. `adapter` observes steps that are due."""
        self._fused_prompts = fused_prompts
        self._devices, self._pool, self._adapter = devices, pool, adapter
        self._open = tuple((kind, device.info.backend) for kind, device in devices.items())
        self.set_timing(False)

    def run(
        self,
        context: Context,
        phase: Phase,
        tokens: Sequence[int],
        logit_rows: int,
        chunks: Sequence[int],
        mode: PrefillMode = "cut",
        on_device_busy: OnDeviceBusy = nothing,
    ) -> Step:
        """Run a step of these tokens, in one call or several chunks. Raises `DeviceError`."""
        rows: list[int] = []
        if context.score_stats is not None:
            first = context.cached
            rows = [first + row for row in rows_of(phase, first, len(tokens))]
        sums_scores = bool(rows)
        if len(chunks) > 1:
            step = self.steps.window(
                context, chunks, logit_rows, sums_scores=sums_scores, mode=mode
            )
        else:
            # Behind a closed gate the GPU would not decode the layers that the host waits for.
            wait_values = (
                self.steps.lowering.synchroniser.wait_values_now() and context.gate is None
            )
            step = self.steps.step(
                context,
                phase,
                len(tokens),
                logit_rows,
                wait_values=wait_values,
                sums_scores=sums_scores,
            )
        step = self._loading(context, step)
        for chunk, (start, stop) in enumerate(pairwise(accumulate(chunks, initial=0))):
            at = context.cached + start
            self._pool.feed(
                tokens[start:stop],
                at,
                chunk=chunk,
                base=context.cache.base,
                logit_rows=logit_rows,
            )
        sides = self._enter((context,), step)
        first = phase == "prefill" or not self.steps.band_of([context])  # which the adapter knows
        adapter = self._adapter if len(chunks) == 1 and first and not sums_scores else None
        timed = adapter is not None and adapter.due(phase, len(tokens))
        self.set_timing(timed)
        context.cache.states.at = UNKNOWN  # until the step has ended
        run = self._execute(step, on_device_busy)
        context.cache.leave(sides, context.cached, context.cached + len(tokens))
        if timed and adapter is not None:
            adapter.observe(step, run.stamps)
        if rows and context.score_stats is not None:
            sums = self.steps.lowering.row_scores.of(0).end(len(chunks))
            if sums is not None:
                context.score_stats.add(sums, rows)
        context.work.add(run, len(tokens), phase, self._open)
        self._account((context,), step, run)
        return step

    def run_pieces(
        self, context: Context, pieces: Sequence[TextPiece], tokens: Sequence[int], logit_rows: int
    ) -> Step:
        """Run a prompt's step on pieces of a context, of these tokens. Raises `DeviceError`."""
        step = self._loading(context, self.steps.of_pieces(context, shape_of(pieces), logit_rows))
        positions = [piece.position for piece in pieces]
        self._pool.feed_rows(tokens, positions, [context.cache.base] * len(pieces))
        self.set_timing(False)
        sides = self._enter((context,), step)
        run = self._execute(step, nothing)
        for piece in pieces:
            context.cache.leave(sides, piece.position, piece.position + piece.tokens)
        context.work.add(run, len(tokens), "prefill", self._open)
        self._account((context,), step, run)
        return step

    def run_contexts(
        self,
        contexts: Sequence[Context],
        tokens: Sequence[int],
        on_device_busy: OnDeviceBusy = nothing,
        *,
        segment: int = 1,
    ) -> Step:
        """Decode one token of each context in one step. Raises `DeviceError`.

        With a longer `segment` it reads so many tokens of a prompt on each, whose attention scores
        are not summed (`StepCache.of_contexts`).
        """
        phase: Phase = "decode" if segment == 1 else "prefill"
        sampled = [
            phase == "decode"
            and context.score_stats is not None
            and bool(rows_of(phase, context.cached, 1))
            for context in contexts
        ]
        wait_values = self.steps.lowering.synchroniser.wait_values_now()
        step = self.steps.of_contexts(
            contexts, segment=segment, wait_values=wait_values, sums_scores=any(sampled)
        )
        positions = [context.cached for context in contexts]
        self._pool.feed_rows(tokens, positions, [context.cache.base for context in contexts])
        self.set_timing(False)
        sides = self._enter(contexts, step)
        for context in contexts:
            context.cache.states.at = UNKNOWN
        run = self._execute(step, on_device_busy)
        for row, context in enumerate(contexts):
            context.cache.leave(sides, context.cached, context.cached + segment)
            context.work.add(run.of_row(row, len(contexts)), segment, phase, self._open)
            sums = self.steps.lowering.row_scores.of(row).end(1) if sampled[row] else None
            if sums is not None and context.score_stats is not None:
                context.score_stats.add(sums, [context.cached])
        self._account(contexts, step, run)
        return step

    def validate(
        self, steps: Sequence[Step], contexts: Sequence[Context], vocab_size: int, max_seq_len: int
    ) -> None:
        """Fuse launches of the steps and check their results; run unfused where they differ."""
        for step in steps:
            self._enter(contexts, step)
        for context in contexts:
            context.cache.states.at = UNKNOWN
        with self.control.on_core():
            self.fuses = self.fuses and fused_results_match(
                steps, contexts, self._pool, self._devices, self.executor, vocab_size, max_seq_len
            )

    @property
    def last_step(self) -> Step:
        """Return the step that ran last, with its completions, for benchmarks and tests.

        It is valid while its context is open and the cuts are the same.
        """
        step = None if self._last is None else self._last()
        assert step is not None
        return step

    @property
    def last_run(self) -> StepRun:
        """Return what the last step took."""
        assert self._last_run is not None
        return self._last_run

    def start_trace(self) -> None:
        """Record every step from here on, with the devices' own clocks where they have one."""
        self.trace = Trace()
        self.set_timing(False)

    def stop_trace(self) -> Trace:
        """Stop recording; return the trace. Raises `UserError` if none was started."""
        if self.trace is None:
            raise UserError("no trace was started")
        trace, self.trace = self.trace, None
        self.set_timing(False)
        return trace

    def set_timing(self, on: bool) -> None:
        """Let the devices record the times of their calls.

        They do if `on`, or where a trace or a limited GPU share needs them.
        """
        on = on or self.trace is not None or self.gpu_share is not None
        if on != self._timed:
            self._timed = on
            for device in self._devices.values():
                if isinstance(device, SupportsQueueControl):
                    device.set_timing(on)

    @staticmethod
    def _enter(contexts: Sequence[Context], step: Step) -> Mapping[int, Side]:
        """Let the sides that compute attention see the rows of their layers; return those sides.

        None where memory is coherent.
        """
        if not any(context.cache.handed_over for context in contexts):
            return {}
        for context in contexts:
            context.cache.enter(step.cache_sides)
        return step.cache_sides

    def _execute(self, step: Step, on_device_busy: OnDeviceBusy) -> StepRun:
        """Run a step whose inputs are in the pool."""
        with self.control.on_core():
            self.steps.lowering.row_scores.begin()
            ran, waits_s = step, None
            prompt = step.phase == "prefill"
            # On a context that is still filled a step runs once: to fuse one that decodes does not
            # pay, but a prompt's would have to make kernel objects instead.
            once = step is self._loading_step
            pays = self._fused_prompts.fit(step) if prompt else not once
            if self.fuses and not self._timed and pays:
                # Of prompts the usual program is compiled at the first start, and no other.
                ran, self.fuses = fused(step, self._devices, compiles=not prompt)
            if prompt and ran is not step:
                waits_s = self._fused_prompts.waits_s(step)
            run = self.executor.run(ran, on_device_busy, self._devices.values())
            self._fused_prompts.observe(waits_s, run.wall_s)
            self._last_run = run
        self._last = weakref.ref(ran)
        self.copied_bytes += step.copied_bytes
        if self.trace is not None:
            self.trace.add(step, run)
        return run

    def _loading(self, context: Context, step: Step) -> Step:
        """Return the step on a context that another thread still fills, layer by layer."""
        gate, self._loading_step = context.gate, None
        if gate is not None and context.cache.handed_over:  # layers are, before the step begins
            gate.wait(gate.layers - 1)
        if gate is None or gate.done:
            context.gate = None
            return step
        self._loading_step = step = step.behind(gate)  # alive while it is the last
        return step

    def _account(self, contexts: Sequence[Context], step: Step, run: StepRun) -> None:
        """Call the watch, and pause where the GPU was busy for more than its share."""
        if self.watch is not None and len(contexts) == 1:
            self.watch(step.phase, step.tokens, contexts[0].cached, run.wall_s)
        if self.gpu_share is None:
            return
        busy_s = gpu_busy_s(step, run.usage.get("gpu", Usage()).busy_s)
        wall_s = self.gpu_share.after(busy_s, run.wall_s)
        for context in contexts:
            context.work.gpu_busy_s += busy_s / len(contexts)
            context.work.wall_s += wall_s / len(contexts)
