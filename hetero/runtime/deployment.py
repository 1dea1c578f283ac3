"""A plan on open devices: its placement, what is built for it, and how it changes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hetero.backends.errors import DeviceError, DeviceLostError, WaitTimeoutError
from hetero.backends.formats import CacheFormat
from hetero.backends.host.clock import Clock, SystemClock
from hetero.backends.ops import Embed
from hetero.backends.optional import SupportsCompaction, SupportsHandovers
from hetero.backends.protocol import DEFAULT_DEADLINE_S, KINDS, Device, DeviceKind, memory_owner
from hetero.errors import FallbackWarning
from hetero.models.graph import model_graph
from hetero.models.model_weights import ModelWeights
from hetero.models.row_tables import GivenRows, RowTable, scaled
from hetero.profiler.model_graph import HIDDEN, ModelGraph
from hetero.runtime.adaptive import Adaptation, Adapter, Solver
from hetero.runtime.fused_prompts import FusedPrompts
from hetero.runtime.handover import incoherent
from hetero.runtime.kernels import Devices, Progress, prepare_kernels
from hetero.runtime.kv.context import Context
from hetero.runtime.kv.context_store import ContextStore
from hetero.runtime.kv.kv_cache import CacheLayout
from hetero.runtime.launch_costs import LaunchCosts
from hetero.runtime.logits import LogitsReader
from hetero.runtime.lowering import Lowering
from hetero.runtime.memory_estimate import MemoryEstimate, check_contexts, fitting_window
from hetero.runtime.pool import ActivationPool, Shape
from hetero.runtime.prefill_mode import WHOLE_QUEUES, PrefillModes, max_in_flight
from hetero.runtime.route_counts import RouteCounts
from hetero.runtime.schedule import Order, Orders
from hetero.runtime.sizes import LONGEST_VERIFIED, Caches, place, planned_layout
from hetero.runtime.slot_refs import SlotRef
from hetero.runtime.step import Step
from hetero.runtime.step_cache import StepCache
from hetero.runtime.step_lock import StepLock, lost_error
from hetero.runtime.step_runner import StepRunner
from hetero.runtime.waits import Synchroniser, SyncMethod
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import single_device
from hetero.solver.placement import Placement
from hetero.solver.plan import Phase

if TYPE_CHECKING:
    from hetero.profiler.cost import CostModel

SLOWEST_FLOPS = 2e10  # of a device that still works: bounds how long a step is waited for
# Lowered when a model is opened at first, so that no kernel is compiled while a prompt waits.
WARM_STEPS: tuple[tuple[Phase, int], ...] = (("prefill", 8), ("prefill", 32), ("decode", 1))
UNFUSED = (8,)  # tokens of those whose kernels other prompts do not use: a program less to compile


@dataclass(frozen=True, kw_only=True)
class DeploymentOptions:
    """Options of `Engine` that hold for every plan and set of devices."""

    max_seq_len: int
    kv: CacheFormat = CacheFormat.F32
    whole_caches: bool = False
    sync: SyncMethod = "fast"
    deadline_s: float = DEFAULT_DEADLINE_S
    memory_budget_bytes: int | None = None
    adapts: bool = True
    order: Order = "fifo"
    cost: CostModel | None = None
    clock: Clock = field(default_factory=SystemClock)


@dataclass(frozen=True, kw_only=True)
class MoveTarget:
    """Devices to move to, with the plan for them and what `Engine` takes with it.

    `warm`: launch the usual steps once, for nothing has compiled what they need.
    """

    devices: Devices
    plan: ExecutionPlan
    source: Solver | None = None
    adapts: bool = True
    order: Order = "fifo"
    cost: CostModel | None = None
    control_core: int | None = None
    warm: bool = True


class Deployment:
    """Everything that depends on the plan and the devices. Owned by the control thread.

    `build` makes it. `source` gives plans for prompts of a length that the plan does not list; with
    `adapts` cuts then follow the devices' measured speeds (`change_cuts`), and `adaptations` says
    when and why. A device that fails is dropped with one warning and `fallback` says why; the other
    continues from the same state of every context (`drop`), but for `lost`: the tokens of contexts
    whose keys and values only the failed device has seen. `move` continues on other devices, from
    the same state too.

    `memory` is that of pool, weights and one context, computed before any is allocated; more than
    `memory_budget_bytes`, than the machine has or than a device allocates at once is refused
    (`UserError`). By an `order` other than `fifo` and a cost model, `window` calls of a prompt are
    one step, whose launches run in an order that is predicted to be shorter; in it nothing is
    adapted, and what is not finite costs the tokens of all of them. With `whole_caches` layers that
    have a window keep what it has left, too. `warm`: lower usual steps in `build`. `hidden` gives
    the hidden states that a head for multi-token prediction reads.
    """

    def __init__(
        self,
        weights: ModelWeights,
        devices: Devices,
        options: DeploymentOptions,
        lock: StepLock,
        contexts: ContextStore,
        steps: StepCache,
        runner: StepRunner,
        *,
        warm: bool,
    ) -> None:
        self.devices = dict(devices)
        self.fallback = ""
        self.adaptations: list[str] = []
        self.hidden = GivenRows(weights.config.hidden_size)
        self._weights, self._config, self._options = weights, weights.config, options
        self._lock, self._contexts, self._steps, self._runner = lock, contexts, steps, runner
        self._warmed = not warm
        self._closed = False
        self._route_counts: RouteCounts | None = None
        self._rows = 1  # contexts that decode together, for whose steps everything is compiled

    def build(self, plan: ExecutionPlan, source: Solver | None, progress: Progress | None) -> None:
        """Build everything for a plan on the devices as they are now."""
        self._steps.clear()
        self.placement, layout = self._place(plan, source)
        self.adapter = None
        if source is not None and self._options.adapts and len(self.devices) > 1:
            self.adapter = Adapter(source, self.placement, clock=self._options.clock.now)
        self.window, slots, self.memory = self._sized(layout)
        self.admit(len(self._contexts.open_contexts()))
        self.kernels = prepare_kernels(
            self._weights,
            self.placement,
            self.devices,
            progress,
            prefetch=not self.memory.file_bytes,
        )
        for device in self.devices.values():
            if isinstance(device, SupportsCompaction):
                device.compact_weights()
            if isinstance(device, SupportsHandovers):
                device.set_explicit_handovers(not device.capabilities.coherent)
        owner = memory_owner(self.devices)
        tables = _tables(self.placement.graph, self._weights, self.hidden)
        self.pool = ActivationPool(slots, owner, tables)
        self.pool.map_to(self.devices.values())
        self.lost = self._contexts.provide(
            layout, owner.allocate, self.admit, incoherent(self.devices)
        )
        flops = 2 * self._config.weights_per_token
        self._runner.use(self.devices, self.pool, self.adapter, FusedPrompts(flops))
        with self._runner.control.on_core():
            self.synchroniser = Synchroniser(
                self.devices,
                self._options.sync,
                deadline_s=self._options.deadline_s,
                token_s=flops / SLOWEST_FLOPS,
                # A wait on a value keeps the GPU from others.
                wait_values=self._runner.gpu_share is None,
                clock=self._options.clock,
            )
        graph = self.placement.graph
        self.logits = LogitsReader(
            self.pool,
            self._steps,
            self.devices,
            self._runner.control,
            head_input=graph.nodes[-1].slots["x"],
            static=self._weights.weight_format.activations.static,
            copies=self._options.sync == "copy",
            sampled=graph.prompt_layers < graph.layers,
        )
        self.lower()
        for phase, m in () if self._warmed else self._warm_steps():
            self._steps.lowered(phase, m, 1)
        for band in self._later_bands:  # so that no answer waits for it
            self._steps.lowered("decode", 1, 1, band=band)
        for context in self._contexts.open_contexts():
            self.warm(context)

    def _sized(self, layout: CacheLayout) -> tuple[int, dict[SlotRef, Shape], MemoryEstimate]:
        """Return the calls in flight that fit the memory, as `fitting_window` does."""
        options = self._options
        limited = self._runner.gpu_share is not None or options.sync in WHOLE_QUEUES
        most = 1
        if len(self.devices) == 2 and not limited:
            most = max_in_flight(self.placement.plan, options.max_seq_len, options.order)
        return fitting_window(
            self.placement,
            self._config,
            layout,
            self.devices,
            most=most,
            shadows=self._weights.outliers(),
            budget_bytes=options.memory_budget_bytes,
            weights_in_memory=self._weights.in_memory,
            mapped=lambda: self._weights.mapped,
        )

    def _place(self, plan: ExecutionPlan, source: Solver | None) -> tuple[Placement, CacheLayout]:
        """Return the plan placed on the open devices, and its cache layout."""
        able = {kind: device.capabilities for kind, device in self.devices.items()}
        caches: Caches = {
            "max_seq_len": self._options.max_seq_len,
            "kv": self._options.kv,
            "whole": self._options.whole_caches,
        }
        placement = place(
            plan,
            self._config,
            self._weights.weight_format,
            able,
            source=source,
            shadows=self._weights.outliers(),
            **caches,
        )
        return placement, planned_layout(placement.plan, self._config, able, **caches)

    def _warm_steps(self) -> list[tuple[Phase, int]]:
        phases = [x for x in WARM_STEPS if x[0] == "decode" or not self.placement.online]
        return [(phase, min(m, self.placement.longest)) for phase, m in phases]

    @property
    def _later_bands(self) -> range:
        """Return the numbers of decode's bands after the first (`Placement.band_at`)."""
        return range(1, len(self.placement.bands) + 1)

    def warm(self, context: Context) -> None:
        """Launch the usual steps once, which may compile what was never launched."""
        if not self._warmed:
            self._warmed = True
            self._runner.fuses = True
            steps = [self._steps.step(context, phase, m) for phase, m in self._warm_steps()]
            steps += [self._steps.step(context, "decode", 1, band=x) for x in self._later_bands]
            self.validate([x for x in steps if x.tokens not in UNFUSED], [context])

    @property
    def max_rows(self) -> int:
        """Return how many contexts can decode in one step; 1 where the plan has no such step."""
        return min(LONGEST_VERIFIED, self.placement.longest) if self.placement.joins else 1

    def warm_rows(self, contexts: Sequence[Context]) -> None:
        """Lower and compile what decodes up to so many contexts, so that no answer waits for it."""
        self._rows = max(self._rows, len(contexts))
        for m in range(2, min(len(contexts), self.max_rows) + 1):
            bands = (0, *self._later_bands)
            steps = [self._steps.of_contexts(contexts[:m], band=band) for band in bands]
            self.validate(steps, contexts[:m])

    def validate(self, steps: Sequence[Step], contexts: Sequence[Context]) -> None:
        """Fuse launches of the steps and check their results (`StepRunner.validate`)."""
        self._runner.validate(steps, contexts, self._config.vocab_size, self._options.max_seq_len)

    def admit(self, count: int) -> None:
        """Raise an error unless there is room for so many contexts."""
        self.check_open()
        check_contexts(self.memory, count, self._options.memory_budget_bytes)

    def lower(self) -> None:
        """Lower all steps again, by the placement as it is now."""
        cost, order = self._options.cost, self._options.order
        lowering = Lowering(
            self.placement,
            self.kernels,
            self.pool,
            self.devices,
            self.synchroniser,
            self._route_counts,
        )
        costs = None if cost is None else LaunchCosts(cost, self.placement)
        self._steps.reset(lowering, costs)
        able = {kind: device.capabilities for kind, device in self.devices.items()}
        self.prefill_modes = PrefillModes(self.placement, costs, order, able, window=self.window)

    def count_routes(self) -> RouteCounts:
        """Return what all later steps count: how often each routed expert is chosen."""
        self._route_counts = RouteCounts(self.placement.graph)
        self.lower()
        return self._route_counts

    def change_cuts(self, change: Adaptation) -> None:
        """Continue with other cuts of the same kernels."""
        self.adaptations.append(change.reason)
        self.placement = change.placement
        self.lower()

    def drop(self, error: DeviceError) -> None:
        """Continue on one of the other devices, from the same state, with one warning.

        Raises the error where no other device is left. Activations and every context's keys and
        values get new memory, because a device that hangs may still write into the old one. Where
        the other device cannot take over (memory, for one) the model is closed.
        """
        failed = self._culprit(error)
        able = [kind for kind in KINDS if kind in self.devices and kind != failed]
        if failed is None or not able:
            raise error
        kind = able[0]
        rest: dict[DeviceKind, Device] = {kind: self.devices[kind]}
        self.fallback = (
            f"going on with {kind} ({rest[kind].info.backend}) alone because the {failed} failed: "
            f"{error}"
        )
        warnings.warn(self.fallback, FallbackWarning, stacklevel=5)
        others = [device for own, device in self.devices.items() if own != kind]
        self.devices = rest
        for other in others:
            with suppress(DeviceError):
                other.close()
        stored, shadows = self._weights.weight_format, self._weights.outliers()
        spec = model_graph(self._config, stored, self.placement.plan.model, shadows=shadows)
        try:
            self._warmed = False
            self.build(single_device(spec, kind), None, None)
        except BaseException:
            self.close()
            raise

    def move(self, to: MoveTarget) -> None:
        """Continue on other devices, from the same state of every context, and close these.

        Where they cannot take over everything is as before, but for the devices of `to`, which are
        closed, and the error is raised.
        """
        before, options, plan = self.devices, self._options, self.placement.plan
        core, orders = self._runner.control.core, self._steps.orders
        order: Order = "fifo" if to.cost is None else to.order
        try:
            self._use(to.devices, replace(options, adapts=to.adapts, order=order, cost=to.cost))
            self._runner.control.move_to(to.control_core)
            self._steps.orders = Orders(order)
            self._warmed = not to.warm
            self.build(to.plan, to.source, None)
            rows = self._contexts.open_contexts()[: self._rows]
            if len(rows) > 1:
                self.warm_rows(rows)
        except BaseException:
            for device in to.devices.values():
                with suppress(DeviceError):
                    device.close()
            self._use(before, options)
            self._runner.control.move_to(core)
            self._steps.orders, self._warmed = orders, True
            self.build(plan, None, None)
            raise
        for device in before.values():
            with suppress(DeviceError):
                device.close()

    def _use(self, devices: Devices, options: DeploymentOptions) -> None:
        self.devices, self._options = dict(devices), options
        self._runner.fuses = True

    def _culprit(self, error: DeviceError) -> DeviceKind | None:
        """Return the kind of the device that an error names."""
        if isinstance(error, WaitTimeoutError) and error.kind in self.devices:
            return error.kind
        named = [k for k, d in self.devices.items() if d.info.backend == error.device]
        lost = [k for k in named if self.devices[k].state() != "open"]
        failed = lost or named
        return failed[0] if len(failed) == 1 else None

    def close(self) -> None:
        """Release the devices; idempotent."""
        self._closed = True
        self._steps.clear()
        self.synchroniser.close()
        for device in self.devices.values():
            device.close()

    def check_open(self) -> None:
        """Raise an error where the model was closed, or its steps lost their thread."""
        if self._lock.lost:
            raise lost_error()
        if self._closed:
            raise DeviceLostError("engine", "running the model", "the model was closed")


def _tables(graph: ModelGraph, weights: ModelWeights, hidden: RowTable) -> dict[str, RowTable]:
    """Return what tokens are looked up in, with its scale, by the slot for the rows.

    Of a head for multi-token prediction `hidden` is among them.
    """
    tables: dict[str, RowTable] = {}
    for node in graph.nodes:
        if isinstance(node.op, Embed) and node.op.mapped:
            tables[node.slots["y"]] = scaled(weights.table(node.name), node.op.scale)
        elif HIDDEN in node.slots.values():
            tables[HIDDEN] = hidden
    return tables
