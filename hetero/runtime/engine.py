"""The engine: runs a model's decoder on the devices of one `ExecutionPlan`."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from hetero.backends.errors import DeviceError, DeviceLostError, WaitTimeoutError
from hetero.backends.host.affinity import pinned
from hetero.backends.host.timers import timer_slack
from hetero.backends.memory import Tensor
from hetero.backends.ops import WeightFormat
from hetero.backends.protocol import DEFAULT_DEADLINE_S, DeviceKind
from hetero.errors import FallbackWarning, UserError, memory_for
from hetero.models.config import ModelConfig
from hetero.models.weights import ModelWeights
from hetero.placement.device_set import graphs_of
from hetero.runtime.adaptive import Adaptation, Adapter, Solver
from hetero.runtime.decoder import decoder_nodes
from hetero.runtime.executor import Executor, Usage
from hetero.runtime.finite import all_finite, first_not_finite
from hetero.runtime.gpu_share import GpuShare, gpu_busy_s
from hetero.runtime.groups import node_groups
from hetero.runtime.kernels import Devices, OnlineCall, Progress, prepare_kernels
from hetero.runtime.lowering import Lowering
from hetero.runtime.memory import check_memory, gathered_slots, needs_of
from hetero.runtime.plan_book import PlanBook
from hetero.runtime.pool import ActivationPool, nbytes_of, slot_shapes
from hetero.runtime.step import Step
from hetero.runtime.trace import Trace
from hetero.runtime.waits import Synchroniser, SyncMethod
from hetero.solver.handmade import single_device
from hetero.solver.plan import ExecutionPlan, Phase

SCORING_PIECE = 32
LONGEST_VERIFIED = 8
STEPS_KEPT = 24
# Lowered when the model is opened, so that no kernel is compiled while a prompt waits.
WARM_STEPS: tuple[tuple[Phase, int], ...] = (("prefill", 8), ("prefill", 32), ("decode", 1))


def pool_bytes(config: ModelConfig, max_seq_len: int, longest: int) -> int:
    """At most what the pool takes for calls of up to `longest` tokens, padded to twice as many."""
    slots = slot_shapes(
        config, tokens=3 * longest, capacity=max_seq_len + 2 * longest, logit_rows=SCORING_PIECE
    )
    return sum(nbytes_of(shape) for shape in slots.values())


class ContextFullError(UserError):
    """More tokens than the context holds."""


class Engine:
    """One model, its KV cache and its lowered steps. Used by one thread at a time.

    A prompt runs in the calls that `plan.steps` names; `plan` is the one that was given, fitted to
    the devices' graphs. A phase and token count is lowered once to a `Step`; the last `STEPS_KEPT`
    are kept. Tokens are given by `prefill` and `decode`, which return float32 logits [vocab] of the
    last token as a view that the next call overwrites. `position` is the number of tokens in the
    cache. `solver` gives a plan for prompts of a length that `plan` does not list. A device that
    fails is dropped with one warning and `fallback` says why; the other goes on from the same
    state. With `adapt` and a solver the cuts follow the devices' measured speeds; `adaptations`
    says when and why.

    `needs` is the memory of pool and weights, computed before any is allocated; more than
    `memory_budget_bytes`, than the machine has or than a device allocates at once is refused
    (`UserError`). `max_gpu_share` below 1 bounds the part of the time that the GPU is busy; then
    `gpu_share` tells what it was. `copied_bytes` are those that steps had to copy between the
    devices' memories so far: none, but for comparisons.
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
    ) -> None:
        config = weights.config
        self.config = config
        self.devices = dict(devices)
        self.max_seq_len = max_seq_len
        self.position = 0
        self.fallback = ""
        self.copied_bytes = 0
        self.trace: Trace | None = None
        self.executor = Executor()
        self._weights = weights
        self._control_core = control_core
        self._sync: SyncMethod = sync
        self._deadline_s = deadline_s
        self._memory_budget_bytes = memory_budget_bytes
        self.adaptations: list[str] = []
        self._adapts = adapt
        self.gpu_share = GpuShare(max_gpu_share) if max_gpu_share < 1 else None
        self._timed = False
        self._steps: OrderedDict[tuple[Phase, int, int, bool], Step] = OrderedDict()
        self._last: Step | None = None
        self._online: list[OnlineCall] = []  # whose graphs the last prompt prepared
        self._closed = False
        self._build(plan, solver, progress)

    def _build(self, plan: ExecutionPlan, source: Solver | None, progress: Progress | None) -> None:
        """Everything that depends on the plan and the devices."""
        config, weights = self.config, self._weights
        self.plan = plan = self._fitted(plan, source)
        both = source is not None and self._adapts and len(self.devices) == 2
        self._adapter = Adapter(source, config.num_layers) if both and source is not None else None
        self._steps.clear()
        self._online = []
        self.book = PlanBook(
            plan, {kind: d.capabilities for kind, d in self.devices.items()}, source=source
        )
        assert plan.step_tokens is not None
        self._longest = plan.step_tokens
        # A padded last piece writes rows behind the last token; they lie beyond every context.
        covering = self._covering(self._longest)
        capacity = self.max_seq_len + covering
        self.nodes = decoder_nodes(config, WeightFormat(weights.weight_format), capacity)
        slots = slot_shapes(
            config,
            tokens=self._longest + covering,  # a second graph may begin where the first ends
            capacity=capacity,
            logit_rows=SCORING_PIECE,
            gathered=gathered_slots(self.nodes, self.book, self.devices),
        )
        self.needs = needs_of(slots, self.nodes, self.book, self.devices)
        check_memory(self.needs, self.devices, self._memory_budget_bytes)
        self._groups = node_groups(self.nodes, plan.fused) if "npu" in self.devices else {}
        self.kernels = prepare_kernels(
            self.nodes, weights, self.book, self.devices, progress, self._groups
        )
        for device in self.devices.values():
            device.settle()
        self.pool = ActivationPool(slots, self.devices.get("npu") or self.devices["gpu"])
        self.pool.map_to(self.devices.values())
        self._set_timing(False)
        with self._control():
            self.synchroniser = Synchroniser(
                self.devices,
                self._sync,
                deadline_s=self._deadline_s,
                gates=self.gpu_share is None,  # waiting at a gate keeps the GPU from others
            )
        self._lower()
        for phase, m in WARM_STEPS:
            if phase == "decode" or not self.book.online:
                self.step(phase, min(m, self._longest))

    def _lower(self) -> None:
        """Lower steps anew, by the book as it is now."""
        self._steps.clear()
        self._lowering = Lowering(
            self.nodes,
            self.book,
            self.kernels,
            self.pool,
            self.devices,
            self.synchroniser,
            self._groups,
        )

    def prefill(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Append a prompt to the context, in the plan's calls; logits [vocab] after its last."""
        self.check(tokens)
        self._run_prompt(tokens)
        return self._last_logits()

    def decode(self, token: int) -> npt.NDArray[np.float32]:
        """Append one token to the context; logits [vocab] after it."""
        self.check((token,))
        self._run("decode", (token,), 1)
        return self._last_logits()

    def verify(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Append up to `LONGEST_VERIFIED` tokens in one decode step; logits [tokens, vocab]."""
        self.check(tokens)
        if len(tokens) > LONGEST_VERIFIED:
            raise ValueError(f"one step verifies {LONGEST_VERIFIED} tokens, got {len(tokens)}")
        self._run("decode", tokens, len(tokens))
        return self._finite(self._logits(len(tokens)).copy())

    def score(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Append tokens; a copy of the logits [tokens, vocab] after every one."""
        self.check(tokens)
        parts = []
        for start in range(0, len(tokens), SCORING_PIECE):
            piece = tokens[start : start + SCORING_PIECE]
            for count in self.plan.steps(len(piece), SCORING_PIECE):
                self._run("prefill", piece[:count], count)
                parts.append(self._finite(self._logits(count).copy()))
                piece = piece[count:]
        return np.concatenate(parts)

    def truncate(self, position: int) -> None:
        """Forget every token from `position` on."""
        if not 0 <= position <= self.position:
            raise ValueError(f"the context holds {self.position} tokens, cannot cut at {position}")
        self.position = position

    def usage(self) -> dict[DeviceKind, Usage]:
        """What each device did since the last `reset_usage`."""
        return {kind: Usage(u.ops, u.busy_s) for kind, u in self.executor.usage.items()}

    def reset_usage(self) -> None:
        """Start counting anew."""
        self.executor.usage.clear()
        if self.gpu_share is not None:
            self.gpu_share.reset()

    def step(self, phase: Phase, m: int, logit_rows: int = 1, *, gates: bool = True) -> Step:
        """The lowered step of m tokens whose last `logit_rows` rows get logits.

        Steps that decode have gates where they gain; `gates` false: the same step without. Prompts
        of an `online-prepare` plan prepare their graphs every time: that is what it compares.
        """
        gates = gates and phase == "decode" and bool(self.synchroniser.bells)
        key = (phase, m, logit_rows, gates)
        if key not in self._steps:
            self._steps[key] = self._lower_step(phase, m, logit_rows, gates=gates)
            if len(self._steps) > STEPS_KEPT:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        if self.book.online and phase == "prefill":
            self._prepare_online(self._steps[key])
        return self._steps[key]

    def _prepare_online(self, step: Step) -> None:
        """Prepare the graphs of a prompt, after those of the prompt before are freed."""
        for call in self._online:
            call.drop()
        self._online = [c for c in (x.call for x in step.launches) if isinstance(c, OnlineCall)]
        with memory_for(f"the graphs of {step.tokens} tokens"):
            for call in self._online:
                call.prepare()

    def _lower_step(self, phase: Phase, m: int, logit_rows: int, *, gates: bool) -> Step:
        with memory_for(f"the {phase} step of {m} tokens"):
            return self._lowering.lower(phase, m, logit_rows, gates=gates)

    @property
    def last_step(self) -> Step:
        """The step that ran last, with its completions."""
        assert self._last is not None
        return self._last

    def start_trace(self) -> None:
        """Record every step from here on, with the devices' own clocks where they have one."""
        self.trace = Trace()
        self._set_timing(False)

    def stop_trace(self) -> Trace:
        """The trace so far; recording ends. Raises `UserError` if none was started."""
        if self.trace is None:
            raise UserError("no trace was started")
        found, self.trace = self.trace, None
        self._set_timing(False)
        return found

    def _set_timing(self, on: bool) -> None:
        """Let the devices keep the times of their calls, where anything needs them."""
        on = on or self.trace is not None or self.gpu_share is not None
        if on != self._timed:
            self._timed = on
            for device in self.devices.values():
                device.set_timing(on)

    def close(self) -> None:
        """Release the devices; idempotent."""
        self._closed = True
        self._steps.clear()
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

    def _run_prompt(self, tokens: Sequence[int]) -> None:
        """Call after call; what is left is cut anew where the plan has changed meanwhile."""
        plan, steps, start = self.plan, list(self.plan.steps(len(tokens))), 0
        while steps:
            count = steps.pop(0)
            self._run("prefill", tokens[start : start + count], 0 if steps else 1)
            start += count
            if steps:
                self._check_stream(self.last_step.tokens)
            if steps and self.plan is not plan:
                plan, steps = self.plan, list(self.plan.steps(len(tokens) - start))

    def _run(self, phase: Phase, tokens: Sequence[int], logit_rows: int) -> None:
        try:
            self._last = self._attempt(phase, tokens, logit_rows)
        except DeviceError as error:
            self._drop(error)
            if len(tokens) > self._longest:  # the other device has shorter calls
                self._run_prompt(tokens)
                return
            self._last = self._attempt(phase, tokens, logit_rows)
        self.position += len(tokens)
        if self._adapter is not None and (change := self._adapter.proposal()) is not None:
            self._change_cuts(change)

    def _change_cuts(self, change: Adaptation) -> None:
        """Go on with other cuts of the same kernels."""
        self.adaptations.append(change.reason)
        self.plan = self._fitted(change.solver.plan, change.solver)
        self.book = self.book.with_plan(self.plan, change.solver)
        self._lower()

    def _attempt(self, phase: Phase, tokens: Sequence[int], logit_rows: int) -> Step:
        gates = self.synchroniser.gates_now()
        step = self.step(phase, len(tokens), logit_rows, gates=gates)
        slot = self.pool["tokens"].array
        slot[: len(tokens)] = tokens
        slot[len(tokens) :] = 0
        self.pool["position"].array[0] = self.position
        before_s = self.usage().get("gpu", Usage()).busy_s
        timed = self._adapter is not None and self._adapter.due(phase, len(tokens))
        self._set_timing(timed)
        with self._control():
            self.executor.run(step)
        if timed and self._adapter is not None:
            self._adapter.observe(step, self.executor.stamps)
        self.copied_bytes += step.copied_bytes
        if self.gpu_share is not None:
            used_s = self.usage().get("gpu", Usage()).busy_s - before_s
            stamps = self.executor.stamps
            self.gpu_share.after(gpu_busy_s(step, used_s), stamps[-1] - stamps[0])
        if self.trace is not None:
            self.trace.add(step, self.executor)
        return step

    def _drop(self, error: DeviceError) -> None:
        """Go on without the device that failed, from the same state, with one warning.

        Raises the error where no other device is left. The KV cache is copied into a new pool,
        because a device that hangs may still write into the old one. Where the other device cannot
        take over (memory, for one) the model is closed.
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
        lost, old = self.devices[failed], self.pool
        self.devices = rest
        with suppress(DeviceError):
            lost.close()
        spec = self.config.spec(WeightFormat(self._weights.weight_format), name=self.plan.model)
        try:
            self._build(single_device(spec, kind), None, None)
            self.pool.copy_caches(old, self.position)
        except BaseException:
            self.close()
            raise

    def _culprit(self, error: DeviceError) -> DeviceKind | None:
        """The kind of the device that an error names."""
        if isinstance(error, WaitTimeoutError) and error.kind in self.devices:
            return error.kind
        named = [k for k, d in self.devices.items() if d.info.backend == error.device]
        lost = [k for k in named if self.devices[k].state() != "open"]
        found = lost or named
        return found[0] if len(found) == 1 else None

    @contextmanager
    def _control(self) -> Iterator[None]:
        """The calling thread as the control thread: on its core, with sleeps as exact as can be."""
        with pinned(self._control_core), timer_slack(1):
            yield

    def _last_logits(self) -> npt.NDArray[np.float32]:
        return self._finite(self._logits(1)[0])

    def _check_stream(self, count: int) -> None:
        """As `_finite`, for a step without logits: the last token has seen all others."""
        slot = self.nodes[-1].slots["x"]  # what the output head would read
        if self._sync != "copy":  # where it would lie in the GPU's memory alone
            self._finite(self.pool[slot].array[count - 1])

    def _finite(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The values. Raises `DeviceError`, and forgets the step's tokens, if any is not finite:
        names the operation and the device that wrote the first such value.
        """
        if all_finite(values):
            return values
        step = self.last_step
        self.position = int(self.pool["position"].array[0])
        if step.bell is not None:
            step = self.step(step.phase, step.tokens, len(np.atleast_2d(values)), gates=False)
        with self._control():
            launch = first_not_finite(step)
        why = "values are not finite: weights are damaged, or too large for this arithmetic"
        if launch is None:
            raise DeviceError("engine", "computing the logits", "NOT_FINITE", why)
        raise DeviceError(
            self.devices[launch.kind].info.backend,
            f"computing {launch.node} ({launch.call.name}) on the {launch.kind}",
            "NOT_FINITE",
            f"{why}; try other --weights, or --device {'npu' if launch.kind == 'gpu' else 'gpu'}",
        )

    def _logits(self, rows: int) -> npt.NDArray[np.float32]:
        """Logits [rows, vocab] of the last step: a view where they lie in one piece."""
        assert self._last is not None
        logits = self._last.logits
        if isinstance(logits, Tensor):
            return logits.array[:rows]
        assert logits is not None
        if rows == 1 and logits.shape[0] == 1:  # one token's panels lie side by side
            return self.pool["logits"].array[:1]
        return logits.gather(rows)

    def check(self, tokens: Sequence[int]) -> None:
        """Raise what `prefill(tokens)` would raise, without running anything."""
        if self._closed:
            raise DeviceLostError("engine", "running the model", "the model was closed")
        if not len(tokens):
            raise UserError("the prompt is empty: give at least one token")
        if self.position + len(tokens) > self.max_seq_len:
            raise ContextFullError(
                f"{self.position + len(tokens)} tokens do not fit the context of "
                f"{self.max_seq_len}: shorten the prompt or open the model with a larger "
                "max_seq_len"
            )
        bad = next((t for t in tokens if not 0 <= t < self.config.vocab_size), None)
        if bad is not None:
            raise UserError(f"token id {bad} is outside the vocabulary of {self.config.vocab_size}")

    def _fitted(self, plan: ExecutionPlan, source: Solver | None) -> ExecutionPlan:
        """The plan with calls that these devices can run."""
        return plan.for_graphs(graphs_of(self.devices), solved=source is not None)

    def _covering(self, tokens: int) -> int:
        """The largest padding of a call of so many tokens, on any device."""
        found = [tokens]
        for device in self.devices.values():
            sizes = device.capabilities.graph_sizes if device.capabilities.static_shapes else ()
            found += [min((size for size in sizes if size >= tokens), default=tokens)]
        return max(found)
