"""Loads a model: opens its files, chooses and opens devices, and builds the engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, get_args

from hetero.arguments import check_count, check_one_of, parse_size
from hetero.backends.errors import KernelBuildError
from hetero.backends.formats import DEFAULT_CACHE, CacheFormat
from hetero.backends.ops import Attention
from hetero.backends.protocol import EVERY_KIND, KINDS
from hetero.errors import ModelError, UserError
from hetero.generation.own_contexts import OwnContexts
from hetero.models import LoadedModel, open_model
from hetero.models.bundle import find_bundle
from hetero.placement.choice import Choice, PlacementRequest, mode_of
from hetero.placement.choosing import choose, plan_on
from hetero.placement.device_set import DeviceMode, DeviceSet, open_devices
from hetero.runtime.deployment import MoveTarget
from hetero.runtime.engine import Engine
from hetero.runtime.kernels import Progress
from hetero.runtime.memory_estimate import file_note
from hetero.runtime.schedule import Order
from hetero.runtime.sizes import pool_bytes
from hetero.runtime.waits import SyncMethod
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.names import NamedStrategy
from hetero.solver.non_matmul_devices import device_of_other
from hetero.solver.plan import STEP_TOKENS

if TYPE_CHECKING:
    from hetero.placement.planning import ProfileLike
    from hetero.profiler.records import DeviceProfile
    from hetero.solver.expert_shares import Routing
    from hetero.solver.prepared import PreparedSolver

DEFAULT_CONTEXT: Final = 4096
OTHER_SOLVER: Final = (
    "this version of hetero solves the bundle's plan otherwise, so prompts of lengths that it does "
    "not list take the next longer entry: run hetero compile again"
)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of `LLM`, which explains them."""

    device: DeviceMode
    gpu: str
    npu: str
    cpu: str
    profile: ProfileLike
    plan: ExecutionPlan | str | os.PathLike[str] | None
    experts: str | os.PathLike[str] | None
    weights: str | None
    max_seq_len: int | None
    sync: SyncMethod
    strategy: NamedStrategy | None
    prompt_lengths: Sequence[int]
    first_prompt: str | Sequence[int] | None
    max_gpu_share: float
    memory_budget: str | int | None
    adapt: bool
    order: Order
    kv: str | None
    whole_caches: bool
    wait_for_plan: bool
    progress: Progress | None


class ModelLoader:
    """One model on its way to an engine; after `load` the attributes say what was opened.

    `max_seq_len` and `kv` are those of its contexts, `choice` says which devices were chosen and
    why, `devices` are open, `plan` is what the engine runs at first. With `layers` the first ones
    are opened alone, which end in the model's output head.
    """

    def __init__(
        self, model: str, options: LoadOptions, *, shortens: bool = False, layers: int = 0
    ) -> None:
        check_one_of("order", options.order, get_args(Order))
        kv = DEFAULT_CACHE if options.kv is None else options.kv
        check_one_of("kv", kv, [*CacheFormat])
        self.kv = CacheFormat(kv)
        self.path, self._options, self._shortens = model, options, shortens
        self.model: LoadedModel = open_model(model, weights=options.weights)
        if layers:
            self.model = self.model.first_layers(layers)
        self._bundle = bundle = None if layers else find_bundle(model)
        length = options.max_seq_len
        if bundle is not None and length is None:
            length = bundle.max_seq_len
        self.max_seq_len = self._context_length(length)
        self.model = self.model.for_context(self.max_seq_len)
        self._whole_caches = options.whole_caches or (bundle is not None and bundle.whole_caches)
        # For keys of prepared kernels: only of layers with windows or states is there more to keep.
        forgets = any(self.model.config.windows) or bool(self.model.config.mixers)
        self._kept_whole = self._whole_caches and forgets
        self._spec = self.model.spec(self.kv)
        memory = options.memory_budget
        self._budget_bytes = None if memory is None else parse_size(memory)

    def load(self) -> tuple[Engine, OwnContexts]:
        """Choose devices, open them, build the engine on them and launch its usual steps once.

        A GPU that cannot compile the model's kernels is left out, with a warning. What was opened
        is closed again where it fails.
        """
        self._choose(self._request())
        return self._on_devices()

    def _choose(self, request: PlacementRequest) -> None:
        """Set the choice, and whether its cuts may adapt."""
        options = self._options
        self.choice: Choice = choose(self._spec, request)
        bundled = request.plan is not None and options.plan is None
        record = self._bundle.solver if bundled and self._bundle is not None else None
        if record is not None and request.solver is None:
            self.choice = replace(self.choice, notes=(*self.choice.notes, OTHER_SOLVER))
        self._adapts = options.adapt and (record is None or record.adapts)
        if options.order == "paper" and self.choice.mode == "hetero" and self.choice.cost is None:
            raise UserError(
                "--order paper sorts calls by the times of a profile, and there is none: name one "
                "with --profile"
            )

    def _open_devices(self) -> None:
        """Open the devices of the choice."""
        options = self._options
        compiled = {} if self._bundle is None else self._bundle.npu_options(self.path)
        self.devices: DeviceSet = open_devices(
            self.choice.mode,
            gpu=self.choice.gpu or options.gpu,
            npu=options.npu,
            cpu=self.choice.cpu,
            compiled=compiled,
            graph_sizes=self.choice.graph_sizes,
            apart=self.choice.plan is not None and self.choice.plan.apart,
        )

    def _on_devices(self) -> tuple[Engine, OwnContexts]:
        """Open the devices, and build the engine on them."""
        self._open_devices()
        try:
            try:
                with self.devices.prewarm(self.purpose) as prewarmed:
                    return self._opened(warm=not prewarmed)
            except KernelBuildError as error:
                self.devices.without_gpu(str(error), self._options.npu)
                return self._opened(warm=True)
        except BaseException:
            self.devices.close()
            raise

    def _request(self) -> PlacementRequest:
        """Return what devices and plan are chosen by."""
        options, plan = self._options, self._given_plan()
        profile, solver = self._bundled_times(plan)
        device = options.device if plan is None else _device_of(plan, options.device)
        expected: tuple[int, ...] = ()
        if options.first_prompt is not None and device == "auto":
            expected = self._count(options.first_prompt)
        return PlacementRequest(
            mode=device,
            gpu=options.gpu,
            npu=options.npu,
            cpu=options.cpu,
            profile=options.profile or profile,
            plan=plan,
            solver=solver,
            strategy=options.strategy or "auto",
            seq_lens=options.prompt_lengths,
            expected=expected,
            context=self.max_seq_len,
            max_gpu_share=options.max_gpu_share,
            weight_budget_bytes=self._weight_budget(),
            routing=None if (path := options.experts) is None else self._routing(path),
        )

    def _routing(self, path: str | os.PathLike[str]) -> Routing:
        """Return how often experts are chosen. Raises `PlanError` of another model's counts."""
        from hetero.solver.expert_shares import Routing

        routing = Routing.load(path)
        if self.model.config.experts is None:
            raise UserError(f"{self.model.name}: has no routed experts: leave --experts out")
        return routing.checked(self._spec)

    def _given_plan(self) -> ExecutionPlan | None:
        """Return the caller's plan, or that of a bundle. Raises `PlanError` if it does not fit."""
        options, bundle, plan = self._options, self._bundle, self._options.plan
        may = options.npu in ("auto", "qnn") and options.device in ("auto", "hetero")
        if bundle is not None and plan is None and may:
            windows = self.model.config.windows
            bundle.check_caches(self.path, windows, whole=self._whole_caches)
            plan = bundle.load_plan(self.path)
        if isinstance(plan, str | os.PathLike):
            plan = ExecutionPlan.load(plan)
        if plan is not None:
            plan.check_fits(self._spec)
        return plan

    def _bundled_times(
        self, plan: ExecutionPlan | None
    ) -> tuple[DeviceProfile | None, PreparedSolver | None]:
        """Return the times that a bundle has of its chip, and its plan's solver.

        Raises `UserError` where it was solved, and other times were asked for.
        """
        bundle, options = self._bundle, self._options
        if bundle is None or plan is None or options.plan is not None:
            return None, None
        if bundle.solver is not None and options.profile is not None:
            raise UserError(
                f"{self.path}: plans by the profile that it was compiled with, so --profile "
                "cannot be honoured: leave it out, or run hetero compile --profile"
            )
        profile = bundle.load_profile(self.path)
        if bundle.solver is None or profile is None:
            return profile, None
        return profile, bundle.load_solver(self.model.spec(CacheFormat.F32), profile, plan)

    def _count(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Return about the length of a prompt that will be asked, as far as the context holds it.

        It is the next power of two, so that a cached decision serves prompts of similar lengths.
        """
        tokens = self.model.encode(prompt) if isinstance(prompt, str) else prompt
        return (min(1 << max(len(tokens) - 1, 0).bit_length(), self.max_seq_len),)

    def _weight_budget(self) -> int | None:
        """Return the bytes of a memory budget that are left for weights."""
        if self._budget_bytes is None:
            return None
        taken = pool_bytes(
            self.model.config,
            self.max_seq_len,
            STEP_TOKENS,
            self.model.weights.outliers(),
            self.kv,
            whole=self._whole_caches,
        )
        return max(self._budget_bytes - taken, 1)

    @property
    def purpose(self) -> str:
        """Return the key of the prewarm list, equal at every start with the same options.

        It has all that decides which kernels are needed, and how they are fused, for a prewarmed
        kernel is not self-tested again. No length of context, and nothing that `auto` compared.
        """
        names = [self.devices.name(x) for x in EVERY_KIND if x in (*KINDS, *self.devices.devices)]
        model = (self.model.fingerprint, str(self.model.weights.weight_format))
        plan = self.choice.plan_on(self.devices.devices)
        how = "by rule" if plan is None else f"{plan.strategy} of {plan.profile}"
        alone = {} if self.choice.solver is None else self.choice.solver.alone
        how += "".join(f", {phase} on the {alone[phase]} alone" for phase in sorted(alone))
        return repr((*model, str(self.kv), self._kept_whole, names, self.choice.mode, how))

    def _opened(self, *, warm: bool) -> tuple[Engine, OwnContexts]:
        """Return the engine of the plan on the devices that are open, and its first context.

        The tokenizer is read concurrently: what comes before is Python, of which one thread runs at
        once.
        """
        options = self._options
        self.model.reading_tokenizer()
        target = self._target(warm=warm)
        engine = Engine(
            self.model.weights,
            target.plan,
            target.devices,
            max_seq_len=self.max_seq_len,
            control_core=target.control_core,
            progress=options.progress,
            sync=options.sync,
            solver=target.source,
            adapt=target.adapts,
            memory_budget_bytes=self._budget_bytes,
            max_gpu_share=options.max_gpu_share,
            fingerprint=self.model.fingerprint,
            kv=self.kv,
            order=target.order,
            cost=target.cost,
            whole_caches=self._whole_caches,
            warm=warm,
        )
        cost = self.choice.cost
        storage = None if cost is None else cost.profile.storage
        graph, budget = engine.placement.graph, self._budget_bytes
        if note := file_note(engine.memory, graph, budget, storage):
            self.choice = replace(self.choice, notes=(*self.choice.notes, note))
        return engine, OwnContexts(partial(engine.new_context, waits=True))

    def _target(self, *, warm: bool) -> MoveTarget:
        """Return the open devices, with the plan for them."""
        devices = self.devices.devices
        self.choice = self.choice.opened(self.devices)
        self.plan = plan_on(self.choice, self._spec, devices)
        self._check_caches()
        if self._options.order == "fifo":
            self.plan = self.plan.model_copy(update={"in_flight": ()})
        return MoveTarget(
            devices=devices,
            plan=self.plan,
            source=self.choice.solver_on(devices),
            adapts=self._adapts and self.devices.numbers == "measured",
            order=self._options.order,
            cost=self.choice.cost if self.choice.plan_on(devices) is not None else None,
            control_core=self.devices.control_core,
            warm=warm,
        )

    def _check_caches(self) -> None:
        """Set float32 caches where an NPU computes attention and cannot read the default format.

        Raises `ModelError` if another format was requested.
        """
        npu = self.devices.devices.get("npu")
        attends = "npu" in self.plan.other_devices or self.plan.shares_attention
        if npu is None or not (attends or self.plan.fused):
            return
        for op in {node.op for node in self._spec.nodes if isinstance(node.op, Attention)}:
            elsewhere = device_of_other(op, "npu", self.devices.devices) != "npu"
            if elsewhere or not npu.accepts(replace(op, kv=CacheFormat.F32)):
                continue  # what no format helps is said when kernels are prepared
            accepted = npu.accepts(replace(op, kv=self.kv))
            if not accepted and self._options.kv is not None:
                why = "; ".join(filter(None, (accepted.reason, accepted.remedy)))
                raise ModelError(f"{self.devices.name('npu')}: {why}")
            if not accepted:
                note = f"keys and values are cached in f32: {self.devices.name('npu')} reads no f16"
                self.kv = CacheFormat.F32
                self.choice = replace(self.choice, notes=(*self.choice.notes, note))
                return

    def _context_length(self, max_seq_len: int | None) -> int:
        limit = self.model.config.max_position
        if max_seq_len is None:
            return min(limit, DEFAULT_CONTEXT)
        check_count("max_seq_len", max_seq_len)
        if self._shortens:
            return min(limit, max_seq_len)
        if not 1 <= max_seq_len <= limit:
            raise ModelError(
                f"max_seq_len must be in [1, {limit}] for {self.model.name}, got {max_seq_len}"
            )
        return max_seq_len


def _device_of(plan: ExecutionPlan, device: DeviceMode) -> DeviceMode:
    """Return devices that a plan needs. Raises `UserError` if others were asked for."""
    needed = mode_of(plan)
    if device not in ("auto", needed):
        raise UserError(
            f"plan {plan.plan_id} runs on {needed}, not on {device}: leave out the device, or make "
            "another plan"
        )
    return needed
