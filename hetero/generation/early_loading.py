"""Opens a model so that its first text comes at once, and moves it to other devices later."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Final, Protocol

from hetero.backends.errors import DeviceError
from hetero.backends.formats import DEFAULT_CACHE, CacheFormat
from hetero.backends.protocol import Device, DeviceKind
from hetero.backends.registry import EVERY_CORE, open_device, split_driver
from hetero.errors import UserError, one_sentence
from hetero.generation.late_plan import LatePlan
from hetero.generation.loading import LoadOptions, ModelLoader
from hetero.generation.own_contexts import OwnContexts
from hetero.generation.second_device import SecondDevice
from hetero.placement import decisions
from hetero.placement.choice import Choice, PlacementRequest
from hetero.placement.choosing import choose
from hetero.placement.device_set import DRIVEN, DeviceSet, control_core
from hetero.placement.phase_choice import PhaseChoice, kind_of
from hetero.runtime.engine import Engine
from hetero.runtime.executor import nothing
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.plan import PHASES

EARLY_NPU: Final = "ort-cpu"  # which compiles nothing
EARLY: Final = (
    "preparing OpenCL kernels in another process, once on this machine: until then the NPU "
    "(ort-cpu) answers alone (--wait-for-plan waits)"
)


class EarlyLoader(ModelLoader):
    """A `ModelLoader` that does not wait for kernels to be compiled, unless `wait_for_plan`.

    A model that was not opened with these options here before is opened on the NPU alone, where
    that computes it; `late` then moves it to the devices of its plan. Where `auto` took one device
    alone, which is not this processor, `second` tries another one if it is slower than predicted.
    `choice`, `devices` and `plan` change with each move, and `moved` is called.
    """

    def __init__(self, model: str, options: LoadOptions) -> None:
        super().__init__(model, options)
        self.late: LatePlan | None = None
        self.second: SecondDevice | None = None
        self.moved: Callable[[], object] = nothing

    def load(self) -> tuple[Engine, OwnContexts]:
        """See `ModelLoader.load`. Why a first text has to wait is in the reason of the choice."""
        request, key, waits = self._request(), self._prepared_key(), ""
        if self._may_begin_early(request) and not decisions.is_prepared(key):
            try:
                return self._begun_early(request, key)
            except (DeviceError, UserError) as error:
                waits = f"; the first text waited for it because {one_sentence(str(error))}"
                self.kv = CacheFormat(self._options.kv or DEFAULT_CACHE)
        self._choose(request)
        opened = self._on_devices()
        self.choice = replace(self.choice, reason=self.choice.reason + waits)
        decisions.note_prepared(key)
        self._watch(opened[0], key)
        return opened

    @property
    def moves(self) -> bool:
        """Return whether the model may move to other devices."""
        return self.late is not None or self.second is not None

    def close(self) -> None:
        """End what would move the model; idempotent."""
        for mover in (self.second, self.late):
            if mover is not None:
                mover.close()

    def _prepared_key(self) -> str:
        """Return the key of starts that need the same kernels (`decisions.is_prepared`)."""
        options = self._options
        backends = (options.gpu, options.npu, options.cpu)
        named = (options.device, *backends, options.sync, options.strategy)
        how = (self.kv, self.model.weights.weight_format, self._kept_whole, options.max_gpu_share)
        return decisions.prepared_key(self.model.fingerprint, [str(x) for x in (*named, *how)])

    def _may_begin_early(self, request: PlacementRequest) -> bool:
        """Return whether the options leave it to hetero what computes the first text.

        What a cache that cannot be written would forget is not prepared in another process.
        """
        options = self._options
        named = options.device not in ("auto", "hetero") or options.order == "paper"
        if options.wait_for_plan or named:
            return False
        given = (options.plan, options.profile, options.strategy, options.memory_budget)
        if any(x is not None for x in (*given, self._bundle)) or request.needs_plan:
            return False
        compiles = split_driver(request.backend("gpu"))[0] in (*DRIVEN, EVERY_CORE)
        return compiles and request.backend("npu") == EARLY_NPU and decisions.can_note()

    def _begun_early(self, request: PlacementRequest, key: str) -> tuple[Engine, OwnContexts]:
        """Return the engine on the NPU alone, which moves to its plan's devices later.

        Raises `DeviceError` or `UserError` where the NPU alone does not compute the model.
        """
        opened: dict[DeviceKind, Device] = {"npu": open_device(EARLY_NPU)}
        self.choice, self._adapts = Choice("npu", reason=EARLY, notes=(EARLY,)), False
        self.devices = DeviceSet(self._options.device, "npu", opened, control_core(opened))
        try:
            engine, own = self._opened(warm=False)
        except BaseException:
            self.devices.close()
            raise
        choosing = partial(choose, self._spec, request)
        self.late = LatePlan(engine, self._question(), choosing, partial(self._begin, engine, key))
        return engine, own

    def _question(self, **changes: object) -> dict[str, object]:
        """Return the model and its options, for a child process."""
        options = {x.name: getattr(self._options, x.name) for x in fields(self._options)}
        return {"model": os.fspath(self.path), "options": options | {"progress": None} | changes}

    def _begin(self, engine: Engine, key: str, choice: Choice) -> None:
        """Move the engine to what was chosen, and watch that."""
        self._move(engine, key, choice)
        self._watch(engine, key)

    def _watch(self, engine: Engine, key: str) -> None:
        """Try another device later, if this one turns out slower than predicted.

        On this processor that would mostly say that all is slower.
        """
        devices, alone = list(self.devices.devices.values()), self.choice.alone
        named = not self._options.adapt or self.devices.numbers != "measured"
        if named or len(alone) < 2 or len(devices) > 1 or devices[0].on_host:
            return
        here, other = (kind_of(x.device_set) for x in alone)
        if self.devices.name(here) is None:  # another one, for it could not be opened
            return
        before = self.choice

        def prepare() -> LatePlan:
            choice = _other(before, watch)
            named = {"device": other, "gpu": choice.gpu or self._options.gpu}
            question = self._question(**named, profile=None, experts=None)
            return LatePlan(engine, question, lambda: choice, moved, here=here)

        def moved(choice: Choice) -> None:
            self._move(engine, key, choice)
            watch.moved()

        def back() -> None:
            self._move(engine, key, before)

        self.second = watch = SecondDevice(engine, *alone, prepare=prepare, back=back)

    def _move(self, engine: Engine, key: str, choice: Choice) -> None:
        """Move the engine to the chosen devices; for the thread that has its lock."""
        before = self.choice, self.devices, self.plan, self._adapts
        try:
            self.choice, self._adapts = choice, self._options.adapt
            self._open_devices()
            with self.devices.prewarm(self.purpose) as prewarmed:
                engine.deployment.move(self._target(warm=not prewarmed))
        except BaseException:
            if self.devices is not before[1]:
                self.devices.close()
            self.choice, self.devices, self.plan, self._adapts = before
            raise
        for context, tokens in engine.deployment.lost:
            list(engine.prompt_calls(context, tokens))
        decisions.note_prepared(key)
        self.moved()


def _other(choice: Choice, watch: SecondDevice) -> Choice:
    """Return the next best device alone, compared with what was measured of the chosen one."""
    first, second = watch.first, watch.second.times
    phases = tuple(
        PhaseChoice(
            phase,
            second.device_set,
            second.of_phase(phase),
            first.times.device_set,
            first.times.of_phase(phase) * first.factor(phase),
        )
        for phase in PHASES
    )
    return replace(
        choice,
        mode=kind_of(second.device_set),
        gpu=EVERY_CORE if second.device_set == EVERY_CORE else None,
        reason=f"{second.device_set} alone, because {watch.why}; before: {choice.reason}",
        phases=phases,
    )


class _Noted(Protocol):
    choice: Choice
    devices: DeviceSet
    plan: ExecutionPlan


def note_opened(loader: ModelLoader, llm: _Noted) -> None:
    """Set a model's devices to those that were opened last."""
    llm.choice, llm.devices, llm.plan = loader.choice, loader.devices, loader.plan
