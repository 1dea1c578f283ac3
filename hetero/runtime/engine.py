"""The engine: runs a model's decoder on the devices of one `ExecutionPlan`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from hetero.backends.errors import DeviceError
from hetero.backends.formats import CacheFormat
from hetero.backends.host.clock import Clock, SystemClock
from hetero.backends.host.closing import Closing
from hetero.backends.protocol import DEFAULT_DEADLINE_S, Device, DeviceKind
from hetero.errors import UserError
from hetero.models.graph import movable_ropes
from hetero.models.model_weights import ModelWeights
from hetero.runtime.adaptive import Solver
from hetero.runtime.control import ControlThread
from hetero.runtime.deployment import Deployment, DeploymentOptions
from hetero.runtime.executor import OnDeviceBusy, nothing
from hetero.runtime.filling import filled, recover
from hetero.runtime.gpu_share import GpuShare
from hetero.runtime.kernels import Devices, Progress
from hetero.runtime.kv.context import Context
from hetero.runtime.kv.context_store import ContextStore
from hetero.runtime.kv.session_file import Identity
from hetero.runtime.logits import Logits
from hetero.runtime.memory_estimate import MemoryEstimate
from hetero.runtime.schedule import Order, Orders, windows
from hetero.runtime.sizes import LONGEST_VERIFIED, SCORING_PIECE
from hetero.runtime.step import Step
from hetero.runtime.step_cache import StepCache
from hetero.runtime.step_lock import StepLock
from hetero.runtime.step_runner import StepRunner
from hetero.runtime.waits import SyncMethod
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.placement import Placement
from hetero.solver.plan import Phase, PrefillMode

if TYPE_CHECKING:
    from hetero.profiler.cost import CostModel


class _ShorterCallsError(Exception):
    """The error of a failed device where the other one needs several calls for these tokens."""


class ContextFullError(UserError):
    """The error of more tokens than the context has room for."""


class Engine(Closing):
    """One model and its lowered steps, which run on any of its contexts.

    Used by one thread at a time: `lock` is for callers that have several; keep it from a step until
    its logits are read.

    A prompt runs in the calls of `plan.steps`; `plan` is the given one, fitted to the devices'
    graphs. A phase and token count is lowered once to a `Step`; the last ones are cached
    (`StepCache`). Tokens are appended to a context by `prefill` and `decode`, which return float32
    logits [vocab] of the last token as a view that the next step of any context overwrites.
    `deployment` is what is built for the plan on the devices; it documents the other options.
    `before_step` is called in the thread that has the lock, before a step and never within one: it
    may move the deployment to other devices, and then returns True.

    `contexts` are those of `new_context`; `fingerprint` is the model's, for contexts on disk. A
    step's cost is in its context's `work`, and in `runner.last_run`. `max_gpu_share` below 1 bounds
    the share of the time that the GPU is busy; `runner.gpu_share` then measures it.
    `runner.copied_bytes` are those that steps had to copy between the devices' memories so far:
    none, but for comparisons. All waits and times are of the `clock`: the system's, or that of
    devices in virtual time (`hetero.profiler.simulated_chip`).
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
        clock: Clock | None = None,
    ) -> None:
        config, clock = weights.config, clock or SystemClock()
        self.config = config
        self.max_seq_len = max_seq_len
        self.lock = StepLock()
        self.before_step: Callable[[], bool | None] = nothing
        identity = Identity(
            model=fingerprint, weights=str(weights.weight_format), vocabulary=config.vocab_size
        )
        self.contexts = ContextStore(self.lock, identity, max_seq_len, movable_ropes(config))
        order = "fifo" if cost is None else order
        self.steps = StepCache(Orders(order), max_seq_len, pads_chunks=sync != "copy")
        share = GpuShare(max_gpu_share, clock.sleep) if max_gpu_share < 1 else None
        self.runner = StepRunner(self.steps, ControlThread(control_core), share, clock)
        options = DeploymentOptions(
            max_seq_len=max_seq_len, kv=kv, whole_caches=whole_caches, sync=sync,
            deadline_s=deadline_s, memory_budget_bytes=memory_budget_bytes, adapts=adapt,
            order=order, cost=cost, clock=clock,
        )  # fmt: skip
        self.deployment = Deployment(
            weights, devices, options, self.lock, self.contexts, self.steps, self.runner, warm=warm
        )
        self.deployment.build(plan, solver, progress)

    def new_context(self, *, waits: bool = False) -> Context:
        """Return an empty context. Raises `UserError` where there is no memory for another one."""
        context = self.contexts.open(waits=waits)
        with self.lock:
            self.deployment.warm(context)
        return context

    def prefill(self, context: Context, tokens: Sequence[int]) -> Logits:
        """Append a prompt to a context, in the plan's calls; return the last logits [vocab]."""
        return next(x for x in self.prefill_calls(context, tokens) if x is not None)

    def prefill_calls(self, context: Context, tokens: Sequence[int]) -> Iterator[Logits | None]:
        """Yield once for each step of a prompt; the last item is the logits.

        Steps of other contexts may run between two items.
        """
        self.check(context, tokens)
        for step, is_last in self.prompt_calls(context, tokens):
            yield self.deployment.logits.last(context, step) if is_last else None

    def decode(
        self, context: Context, token: int, on_device_busy: OnDeviceBusy = nothing
    ) -> Logits:
        """Append one token; return logits [vocab] after it (`on_device_busy`: `Executor.run`)."""
        self.check(context, (token,))
        step = self._run(context, "decode", (token,), 1, on_device_busy=on_device_busy)
        return self.deployment.logits.last(context, step)

    @property
    def max_rows(self) -> int:
        """Return how many contexts can decode in one step; 1 where the plan has no such step."""
        return self.deployment.max_rows

    def decode_rows(
        self, rows: Sequence[tuple[Context, int]], on_device_busy: OnDeviceBusy = nothing
    ) -> list[Logits | None]:
        """Append a token to each of 2 to `max_rows` contexts in one step; return their logits.

        They are copies [vocab]. None, and the context unchanged, where values are not finite or no
        device is left that can do this: `decode` it alone.
        """
        contexts, tokens = [context for context, _ in rows], [token for _, token in rows]
        for context, token in rows:
            self.check(context, (token,))
            recover(self, context)
            context.slide()
        if not 2 <= len({*map(id, contexts)}) == len(rows) <= self.max_rows:
            raise ValueError(f"one step decodes 2 to {self.max_rows} contexts, each once")
        self.before_step()
        loading = any(context.gate is not None and not context.gate.done for context in contexts)
        if loading or len(rows) > self.max_rows:
            return [None] * len(rows)
        try:
            step = self.runner.run_contexts(contexts, tokens, on_device_busy)
        except DeviceError as error:
            self.drop(error)
            if len(rows) > self.max_rows:
                return [None] * len(rows)
            for context in contexts:
                recover(self, context)
            step = self.runner.run_contexts(contexts, tokens, on_device_busy)
        logits = self.deployment.logits.of_contexts(step, len(rows))
        for (context, token), row in zip(rows, logits, strict=True):
            if row is not None:
                context.advance((token,))
        return logits

    def verify(self, context: Context, tokens: Sequence[int]) -> Logits:
        """Append up to `LONGEST_VERIFIED` tokens in one decode step; return all logits."""
        self.check(context, tokens)
        if len(tokens) > LONGEST_VERIFIED:
            raise ValueError(f"one step verifies {LONGEST_VERIFIED} tokens, got {len(tokens)}")
        rows = []
        while tokens:
            part = tokens[: self.placement.longest]
            with suppress(_ShorterCallsError):
                rows.append(self._rows(context, "decode", part))
                tokens = tokens[len(part) :]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def score(self, context: Context, tokens: Sequence[int]) -> Logits:
        """Append tokens; return a copy of the logits [tokens, vocab] after every one."""
        return np.concatenate(list(self.score_calls(context, tokens)))

    def score_calls(self, context: Context, tokens: Sequence[int]) -> Iterator[Logits]:
        """Yield the logits of `score` call by call."""
        self.check(context, tokens)
        for start in range(0, len(tokens), SCORING_PIECE):
            piece = tokens[start : start + SCORING_PIECE]
            counts: Sequence[int] = ()
            while piece:
                self.deployment.check_open()
                counts = counts or self.plan.steps(len(piece), SCORING_PIECE)
                try:
                    rows = self._rows(context, "prefill", piece[: counts[0]])
                except _ShorterCallsError:
                    counts = ()
                    continue
                piece, counts = piece[counts[0] :], counts[1:]
                yield rows

    def _rows(self, context: Context, phase: Phase, tokens: Sequence[int]) -> Logits:
        """Append tokens in one call; return a copy of the logits [tokens, vocab] after every one.

        Raises `_ShorterCallsError`, and appends none, if a failed device leaves shorter calls.
        """
        step = self._run(context, phase, tokens, len(tokens))
        return self.deployment.logits.rows(context, step)

    @property
    def devices(self) -> dict[DeviceKind, Device]:
        """Return the devices that have not failed."""
        return self.deployment.devices

    @property
    def memory(self) -> MemoryEstimate:
        """Return the bytes of pool, weights and one context."""
        return self.deployment.memory

    @property
    def placement(self) -> Placement:
        """Return the current plan's placement on the devices."""
        return self.deployment.placement

    @property
    def plan(self) -> ExecutionPlan:
        """Return the current plan, in calls that the devices' graphs can run."""
        return self.placement.plan

    def close(self) -> None:
        """Release the devices; idempotent."""
        self.deployment.close()

    def prompt_calls(
        self, context: Context, tokens: Sequence[int], *, head: bool = True
    ) -> Iterator[tuple[Step, bool]]:
        """Yield each call's step and whether it is the last, which with `head` has logits."""
        plan: ExecutionPlan | None = None
        steps: list[tuple[int, ...]] = []
        mode: PrefillMode = "cut"
        start = 0
        for step, start in filled(self, context, tokens, head=head):
            yield step, start == len(tokens)
        while start < len(tokens):
            if self.plan is not plan:
                plan, modes = self.plan, self.deployment.prefill_modes
                choice = modes.of(len(tokens) - start, context.cached)
                mode, steps = choice.mode, windows(choice.calls, self.deployment.window)
                context.work.mode = str(choice) if choice.seconds else ""
            self.deployment.check_open()  # since the last call another thread may have closed it
            chunks = steps.pop(0)
            part = tokens[start : start + sum(chunks)]
            start += len(part)
            is_last = start == len(tokens)
            step = self._run(context, "prefill", part, int(head and is_last), chunks, mode)
            if not is_last:
                self.deployment.logits.check_stream(context, step)
            yield step, is_last

    def _run(
        self,
        context: Context,
        phase: Phase,
        tokens: Sequence[int],
        logit_rows: int,
        chunks: Sequence[int] = (),
        mode: PrefillMode = "cut",
        on_device_busy: OnDeviceBusy = nothing,
    ) -> Step:
        """Run a step of these tokens, in one call or several."""
        chunks = tuple(chunks) or (len(tokens),)
        moved = self.before_step()
        again = self._in_shorter_calls(context, tokens, logit_rows, chunks) if moved else None
        if again is not None:
            return again
        recover(self, context)
        context.slide()
        try:
            step = self.runner.run(context, phase, tokens, logit_rows, chunks, mode, on_device_busy)
        except DeviceError as error:
            self.drop(error)
            if (again := self._in_shorter_calls(context, tokens, logit_rows, chunks)) is not None:
                return again
            recover(self, context)
            step = self.runner.run(
                context, phase, tokens, logit_rows, chunks, on_device_busy=on_device_busy
            )
        self.deployment.logits.report(context, step)
        context.advance(tokens, keep_state=phase == "prefill")
        adapter = self.deployment.adapter
        if adapter is not None and (change := adapter.proposal()) is not None:
            self.deployment.change_cuts(change)
        return step

    def _in_shorter_calls(
        self, context: Context, tokens: Sequence[int], logit_rows: int, chunks: Sequence[int]
    ) -> Step | None:
        """Run the tokens of a call where other devices need several; None where they do not."""
        if len(chunks) == 1 and len(tokens) <= self.placement.longest:
            return None
        if logit_rows > 1:  # which several calls do not leave in one place
            raise _ShorterCallsError
        *_, (step, _) = self.prompt_calls(context, tokens)
        return step

    def drop(self, error: DeviceError) -> None:
        """Continue without the device that failed; raise the error where no other is left."""
        self.deployment.drop(error)
        for context, tokens in self.deployment.lost:
            list(self.prompt_calls(context, tokens))

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
        self.deployment.check_open()
        if not len(tokens):
            raise UserError("the prompt is empty: give at least one token")
        bad = next((t for t in tokens if not 0 <= t < self.config.vocab_size), None)
        if bad is not None:
            raise UserError(f"token id {bad} is outside the vocabulary of {self.config.vocab_size}")
