"""The engine: runs a model's decoder on the devices of one `ExecutionPlan`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import numpy as np

from hetero.backends.errors import DeviceError, DeviceLostError, WaitTimeoutError
from hetero.backends.formats import CacheFormat
from hetero.backends.protocol import DEFAULT_DEADLINE_S, DeviceKind
from hetero.errors import FallbackWarning, UserError
from hetero.models.graph import model_graph, rope_of
from hetero.models.model_weights import ModelWeights
from hetero.profiler.cost import CostModel
from hetero.profiler.model_graph import Node
from hetero.runtime.adaptive import Adaptation, Adapter, Solver
from hetero.runtime.control import ControlThread
from hetero.runtime.executor import OnDeviceBusy, nothing
from hetero.runtime.gpu_share import GpuShare
from hetero.runtime.kernels import Devices, Progress, prepare_kernels
from hetero.runtime.kv.context import Context
from hetero.runtime.kv.context_store import ContextStore
from hetero.runtime.kv.kv_cache import CacheLayout
from hetero.runtime.kv.session_file import Identity
from hetero.runtime.launch_costs import LaunchCosts
from hetero.runtime.logits import Logits, LogitsReader
from hetero.runtime.lowering import Lowering
from hetero.runtime.memory_estimate import MemoryEstimate, check_contexts, fitting_window
from hetero.runtime.pool import ActivationPool, Shape
from hetero.runtime.prefill_mode import WHOLE_QUEUES, PrefillModes, max_in_flight
from hetero.runtime.schedule import Order, Orders, windows
from hetero.runtime.sizes import LONGEST_VERIFIED, SCORING_PIECE, Caches, place, planned_layout
from hetero.runtime.slot_refs import SlotRef
from hetero.runtime.step import Step
from hetero.runtime.step_cache import StepCache
from hetero.runtime.step_lock import StepLock, lost_error
from hetero.runtime.step_runner import StepRunner
from hetero.runtime.waits import Synchroniser, SyncMethod
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import single_device
from hetero.solver.placement import Placement
from hetero.solver.plan import Phase, PrefillMode

SLOWEST_FLOPS = 2e10  # of a device that still works: bounds how long a step is waited for
# Lowered when a model is opened at first, so that no kernel is compiled while a prompt waits.
WARM_STEPS: tuple[tuple[Phase, int], ...] = (("prefill", 8), ("prefill", 32), ("decode", 1))


class _ShorterCallsError(Exception):
    """A device failed, and the other one needs several calls for these tokens."""


class ContextFullError(UserError):
    """More tokens than the context holds."""


class Engine:
    """One model and its lowered steps, which run on any of its contexts. Used by one thread at a
    time: `lock` is for callers that have several; keep it from a step until its logits are read.

    A prompt runs in the calls that `plan.steps` names; `plan` is the one that was given, fitted to
    the devices' graphs. A phase and token count is lowered once to a `Step`; the last ones are kept
    (`StepCache`). Tokens are appended to a context by `prefill` and `decode`, which return float32
    logits [vocab] of the last token as a view that the next step of any context overwrites.
    `solver` gives a plan for prompts of a length that `plan` does not list. A device that fails is
    dropped with one warning and `fallback` says why; the other continues from the same state of
    every context. With `adapt` and a solver the cuts follow the devices' measured speeds;
    `adaptations` says when and why.

    `contexts` are those of `new_context`; `fingerprint` is the model's, for contexts on disk. What
    a step took is in its context's `work`, and in `runner.last_run`. `memory` is that of pool,
    weights and one context, computed before any is allocated; more than `memory_budget_bytes`, than
    the machine has or than a device allocates at once is refused (`UserError`). `max_gpu_share`
    below 1 bounds the part of the time that the GPU is busy; then `runner.gpu_share` says what it
    was. `runner.copied_bytes` are those that steps had to copy between the devices' memories so
    far: none, but for comparisons. By an `order` other than `fifo` and a cost model, `window` calls
    of a prompt are one step, whose launches run in an order that is predicted to be shorter; in it
    nothing is adapted, and what is not finite costs the tokens of all of them. With `whole_caches`
    layers that have a window keep what it has left, too. `warm`: lower usual steps now.
    """

    def __init__(
        self,
        weights: ModelWeights,
        plan: ExecutionPlan,
        devices: Devices,
        *,
        max_seq_len: int,
        control_core: int | None = None,
        progress: Progress | None = None,
        sync: SyncMethod = "fast",
        deadline_s: float = DEFAULT_DEADLINE_S,
        solver: Solver | None = None,
        adapt: bool = True,
        memory_budget_bytes: int | None = None,
        max_gpu_share: float = 1.0,
        fingerprint: str = "",
        kv: CacheFormat = CacheFormat.F32,
        order: Order = "fifo",
        cost: CostModel | None = None,
        whole_caches: bool = False,
        warm: bool = True,
    ) -> None:
        config = weights.config
        self.config = config
        self.devices = dict(devices)
        self.max_seq_len = max_seq_len
        self.kv = kv
        self.lock = StepLock()
        identity = Identity(
            model=fingerprint, weights=str(weights.weight_format), vocabulary=config.vocab_size
        )
        rope = None if config.positions else rope_of(config)
        self.contexts = ContextStore(self.lock, identity, max_seq_len, rope)
        self.fallback = ""
        self._weights = weights
        self._sync: SyncMethod = sync
        self._deadline_s = deadline_s
        self._memory_budget_bytes = memory_budget_bytes
        self.adaptations: list[str] = []
        self._adapts = adapt
        self.order: Order = "fifo" if cost is None else order
        self._cost = cost
        self._whole_caches = whole_caches
        self._closed = False
        self._warmed = not warm
        self.steps = StepCache(Orders(self.order), max_seq_len, pads_chunks=sync != "copy")
        share = GpuShare(max_gpu_share) if max_gpu_share < 1 else None
        self.runner = StepRunner(self.steps, ControlThread(control_core), share)
        self._build(plan, solver, progress)

    def _build(self, plan: ExecutionPlan, source: Solver | None, progress: Progress | None) -> None:
        """Build everything that depends on the plan and the devices."""
        self.steps.clear()
        self.placement, layout = self._place(plan, source)
        self._adapter = None
        if source is not None and self._adapts and len(self.devices) == 2:
            self._adapter = Adapter(source, self.placement)
        self.window, slots, self.memory = self._sized(layout)
        self._admit(len(self.contexts.open_contexts()))
        self.kernels = prepare_kernels(self._weights, self.placement, self.devices, progress)
        for device in self.devices.values():
            device.compact_weights()
        owner = self.devices.get("npu") or self.devices["gpu"]
        self.pool = ActivationPool(slots, owner)
        self.pool.map_to(self.devices.values())
        self.contexts.provide(layout, owner.allocate, self._admit)
        self.runner.use(self.devices, self.pool, self._adapter)
        with self.control.on_core():
            self.synchroniser = Synchroniser(
                self.devices,
                self._sync,
                deadline_s=self._deadline_s,
                token_s=2 * sum(x.n * x.k * x.count for x in self.config.matmuls()) / SLOWEST_FLOPS,
                # A wait on a value keeps the GPU from others.
                wait_values=self.runner.gpu_share is None,
            )
        self._logits = LogitsReader(
            self.pool,
            self.steps,
            self.devices,
            self.control,
            head_input=self.nodes[-1].slots["x"],
            static=self._weights.weight_format.activations.static,
            copies=self._sync == "copy",
        )
        self.lower()
        for phase, m in () if self._warmed else self._warm_steps():
            self.steps.lowered(phase, m, 1)
        for context in self.contexts.open_contexts():
            self._warm(context)

    def _sized(self, layout: CacheLayout) -> tuple[int, dict[SlotRef, Shape], MemoryEstimate]:
        """See `fitting_window`."""
        apart = (
            len(self.devices) < 2 or self.runner.gpu_share is not None or self._sync in WHOLE_QUEUES
        )
        most = 1 if apart else max_in_flight(self.plan, self.max_seq_len, self.order)
        return fitting_window(
            self.placement,
            self.config,
            layout,
            self.devices,
            most=most,
            shadows=self._weights.outliers(),
            budget_bytes=self._memory_budget_bytes,
        )

    def _place(self, plan: ExecutionPlan, source: Solver | None) -> tuple[Placement, CacheLayout]:
        """Return the plan placed on the open devices, and its cache layout."""
        able = {kind: device.capabilities for kind, device in self.devices.items()}
        caches: Caches = {
            "max_seq_len": self.max_seq_len,
            "kv": self.kv,
            "whole": self._whole_caches,
        }
        placement = place(
            plan,
            self.config,
            self._weights.weight_format,
            able,
            source=source,
            shadows=self._weights.outliers(),
            **caches,
        )
        return placement, planned_layout(placement.plan, self.config, able, **caches)

    def _warm_steps(self) -> list[tuple[Phase, int]]:
        phases = [x for x in WARM_STEPS if x[0] == "decode" or not self.placement.online]
        return [(phase, min(m, self.placement.longest)) for phase, m in phases]

    def _warm(self, context: Context) -> None:
        """Launch the usual steps once, which may compile what was never launched."""
        if not self._warmed:
            self._warmed = True
            self.runner.fuses = True
            steps = [self.steps.step(context, phase, m) for phase, m in self._warm_steps()]
            self._validate(steps, [context])

    def _validate(self, steps: Sequence[Step], contexts: Sequence[Context]) -> None:
        self.runner.validate(steps, contexts, self.config.vocab_size, self.max_seq_len)

    def new_context(self, *, waits: bool = False) -> Context:
        """Return an empty context. Raises `UserError` where there is no memory for another one."""
        context = self.contexts.open(waits=waits)
        with self.lock:
            self._warm(context)
        return context

    def _admit(self, count: int) -> None:
        """Raise an error unless there is room for so many contexts."""
        self._check_open()
        check_contexts(self.memory, count, self._memory_budget_bytes)

    def lower(self) -> None:
        """Lower all steps again, by the placement as it is now."""
        lowering = Lowering(
            self.placement, self.kernels, self.pool, self.devices, self.synchroniser
        )
        costs = None if self._cost is None else LaunchCosts(self._cost, self.placement)
        self.steps.reset(lowering, costs)
        able = {kind: device.capabilities for kind, device in self.devices.items()}
        self.forms = PrefillModes(self.placement, costs, self.order, able, window=self.window)

    def prefill(self, context: Context, tokens: Sequence[int]) -> Logits:
        """Append a prompt to a context, in the plan's calls; logits [vocab] after its last."""
        *_, logits = self.prefill_calls(context, tokens)
        assert logits is not None
        return logits

    def prefill_calls(self, context: Context, tokens: Sequence[int]) -> Iterator[Logits | None]:
        """Yield once for each step of a prompt; the last item is the logits.

        Steps of other contexts may run between two items.
        """
        self.check(context, tokens)
        for step, is_last in self._prompt_calls(context, tokens):
            yield self._logits.last(context, step) if is_last else None

    def decode(
        self, context: Context, token: int, on_device_busy: OnDeviceBusy = nothing
    ) -> Logits:
        """Append one token to a context; logits [vocab] after it. `on_device_busy`: see
        `Executor.run`.
        """
        self.check(context, (token,))
        step = self._run(context, "decode", (token,), 1, on_device_busy=on_device_busy)
        return self._logits.last(context, step)

    @property
    def max_rows(self) -> int:
        """Return how many contexts can decode in one step; 1 where the plan has no such step."""
        return min(LONGEST_VERIFIED, self.placement.longest) if self.placement.joins else 1

    def decode_rows(
        self, rows: Sequence[tuple[Context, int]], on_device_busy: OnDeviceBusy = nothing
    ) -> list[Logits | None]:
        """Append a token to each of 2 to `max_rows` contexts in one step; copies of the logits
        [vocab] after each. None, and the context as it was, where the values are not finite or a
        device that failed leaves nothing that can do this: `decode` it alone.
        """
        contexts, tokens = [context for context, _ in rows], [token for _, token in rows]
        for context, token in rows:
            self.check(context, (token,))
            context.slide()
        if not 2 <= len({*map(id, contexts)}) == len(rows) <= self.max_rows:
            raise ValueError(f"one step decodes 2 to {self.max_rows} contexts, each once")
        if any(context.gate is not None and not context.gate.done for context in contexts):
            return [None] * len(rows)
        try:
            step = self.runner.run_contexts(contexts, tokens, on_device_busy)
        except DeviceError as error:
            self._drop(error)
            if len(rows) > self.max_rows:
                return [None] * len(rows)
            step = self.runner.run_contexts(contexts, tokens, on_device_busy)
        logits = self._logits.of_contexts(step, len(rows))
        for (context, token), row in zip(rows, logits, strict=True):
            if row is not None:
                context.advance((token,))
        return logits

    def warm_rows(self, contexts: Sequence[Context]) -> None:
        """Lower and compile what decodes up to so many contexts, so that no answer waits for it."""
        for m in range(2, min(len(contexts), self.max_rows) + 1):
            self._validate([self.steps.of_contexts(contexts[:m])], contexts[:m])

    def verify(self, context: Context, tokens: Sequence[int]) -> Logits:
        """Append up to `LONGEST_VERIFIED` tokens in one decode step; logits [tokens, vocab]."""
        self.check(context, tokens)
        if len(tokens) > LONGEST_VERIFIED:
            raise ValueError(f"one step verifies {LONGEST_VERIFIED} tokens, got {len(tokens)}")
        rows = []
        while tokens:
            part = tokens[: self.placement.longest]
            with suppress(_ShorterCallsError):
                rows.append(self._rows(context, "decode", part))
                tokens = tokens[len(part) :]
        return np.concatenate(rows)

    def score(self, context: Context, tokens: Sequence[int]) -> Logits:
        """Append tokens; a copy of the logits [tokens, vocab] after every one."""
        return np.concatenate(list(self.score_calls(context, tokens)))

    def score_calls(self, context: Context, tokens: Sequence[int]) -> Iterator[Logits]:
        """Yield the logits of `score` call by call."""
        self.check(context, tokens)
        for start in range(0, len(tokens), SCORING_PIECE):
            piece = tokens[start : start + SCORING_PIECE]
            counts: Sequence[int] = ()
            while piece:
                self._check_open()
                counts = counts or self.plan.steps(len(piece), SCORING_PIECE)
                try:
                    rows = self._rows(context, "prefill", piece[: counts[0]])
                except _ShorterCallsError:
                    counts = ()
                    continue
                piece, counts = piece[counts[0] :], counts[1:]
                yield rows

    def _rows(self, context: Context, phase: Phase, tokens: Sequence[int]) -> Logits:
        """Append tokens in one call; a copy of the logits [tokens, vocab] after every one. Raises
        `_ShorterCallsError`, and appends none, where a device failed and the other one's calls are
        shorter.
        """
        step = self._run(context, phase, tokens, len(tokens))
        return self._logits.rows(context, step)

    @property
    def plan(self) -> ExecutionPlan:
        """Return the current plan, in calls that the devices' graphs can run."""
        return self.placement.plan

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Return the model's operations, in order."""
        return self.placement.graph.nodes

    @property
    def control(self) -> ControlThread:
        """Return the thread that runs steps."""
        return self.runner.control

    def close(self) -> None:
        """Release the devices; idempotent."""
        self._closed = True
        self.steps.clear()
        self.synchroniser.close()
        for device in self.devices.values():
            device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _prompt_calls(self, context: Context, tokens: Sequence[int]) -> Iterator[tuple[Step, bool]]:
        """Yield each call's step and whether it is the last; the remaining tokens are split again
        where the plan has changed meanwhile.
        """
        plan: ExecutionPlan | None = None
        steps: list[tuple[int, ...]] = []
        form: PrefillMode = "cut"
        start = 0
        while start < len(tokens):
            if self.plan is not plan:
                plan, choice = self.plan, self.forms.of(len(tokens) - start, context.cached)
                form, steps = choice.form, windows(choice.calls, self.window)
                context.work.form = str(choice) if choice.seconds else ""
            self._check_open()  # since the last call another thread may have closed it
            chunks = steps.pop(0)
            part = tokens[start : start + sum(chunks)]
            start += len(part)
            step = self._run(context, "prefill", part, int(start == len(tokens)), chunks, form)
            if start < len(tokens):
                self._logits.check_stream(context, step)
            yield step, start == len(tokens)

    def _run(
        self,
        context: Context,
        phase: Phase,
        tokens: Sequence[int],
        logit_rows: int,
        chunks: Sequence[int] = (),
        form: PrefillMode = "cut",
        on_device_busy: OnDeviceBusy = nothing,
    ) -> Step:
        """Run a step of these tokens, in one call or several."""
        chunks = tuple(chunks) or (len(tokens),)
        context.slide()
        try:
            step = self.runner.run(context, phase, tokens, logit_rows, chunks, form, on_device_busy)
        except DeviceError as error:
            self._drop(error)
            # The other device has no windows, and may have shorter calls.
            if len(chunks) > 1 or len(tokens) > self.placement.longest:
                if logit_rows > 1:  # which several calls do not leave in one place
                    raise _ShorterCallsError from error
                *_, (step, _) = self._prompt_calls(context, tokens)
                return step
            step = self.runner.run(
                context, phase, tokens, logit_rows, chunks, on_device_busy=on_device_busy
            )
        context.advance(tokens)
        if self._adapter is not None and (change := self._adapter.proposal()) is not None:
            self._change_cuts(change)
        return step

    def _change_cuts(self, change: Adaptation) -> None:
        """Continue with other cuts of the same kernels."""
        self.adaptations.append(change.reason)
        self.placement = change.placement
        self.lower()

    def _drop(self, error: DeviceError) -> None:
        """Continue without the device that failed, from the same state, with one warning.

        Raises the error where no other device is left. Activations and every context's keys and
        values get new memory, because a device that hangs may still write into the old one. Where
        the other device cannot take over (memory, for one) the model is closed.
        """
        failed = self._culprit(error)
        rest = {kind: device for kind, device in self.devices.items() if kind != failed}
        if failed is None or not rest:
            raise error
        (kind,) = rest
        self.fallback = (
            f"going on with {kind} ({rest[kind].info.backend}) alone because the {failed} failed: "
            f"{error}"
        )
        warnings.warn(self.fallback, FallbackWarning, stacklevel=5)
        lost = self.devices[failed]
        self.devices = rest
        with suppress(DeviceError):
            lost.close()
        stored, shadows = self._weights.weight_format, self._weights.outliers()
        spec = model_graph(self.config, stored, self.plan.model, shadows=shadows)
        try:
            self._warmed = False
            self._build(single_device(spec, kind), None, None)
        except BaseException:
            self.close()
            raise

    def _culprit(self, error: DeviceError) -> DeviceKind | None:
        """Return the kind of the device that an error names."""
        if isinstance(error, WaitTimeoutError) and error.kind in self.devices:
            return error.kind
        named = [k for k, d in self.devices.items() if d.info.backend == error.device]
        lost = [k for k in named if self.devices[k].state() != "open"]
        failed = lost or named
        return failed[0] if len(failed) == 1 else None

    def check(self, context: Context, tokens: Sequence[int]) -> None:
        """Raise what `prefill` would raise, without running anything."""
        self.check_tokens(tokens)
        if context.closed or context.home is not self.contexts:
            self.contexts.own(context).cache  # noqa: B018, one of them raises
        if context.cached + len(tokens) > self.max_seq_len:
            raise ContextFullError(
                f"{context.cached + len(tokens)} tokens do not fit the context of "
                f"{self.max_seq_len}: shorten the prompt or open the model with a larger "
                "max_seq_len"
            )

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raise what `check` raises for any context."""
        self._check_open()
        if not len(tokens):
            raise UserError("the prompt is empty: give at least one token")
        bad = next((t for t in tokens if not 0 <= t < self.config.vocab_size), None)
        if bad is not None:
            raise UserError(f"token id {bad} is outside the vocabulary of {self.config.vocab_size}")

    def _check_open(self) -> None:
        if self.lock.lost:
            raise lost_error()
        if self._closed:
            raise DeviceLostError("engine", "running the model", "the model was closed")
