"""The device sets that compute prompts and answers on open devices, by the plan that runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hetero.backends.protocol import Device, DeviceKind
from hetero.backends.registry import EVERY_CORE
from hetero.placement.choice import Choice
from hetero.placement.phase_choice import LAYER_LEVEL, TENSOR_LEVEL, PhaseChoice
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.plan import PHASES, Phase


def phases_of(
    plan: ExecutionPlan, devices: Mapping[DeviceKind, Device], choice: Choice
) -> tuple[PhaseChoice, ...]:
    """Return each phase, with the seconds that `auto` compared as long as it runs as chosen.

    After them, the depths from which decoding is on other devices.
    """
    compared = {x.phase: x for x in choice.phases}
    phases = []
    for phase in PHASES:
        name, known = _set_of(plan, phase, devices), compared.get(phase)
        shared = name in (TENSOR_LEVEL, LAYER_LEVEL)
        chosen = known is not None and known.device_set == (TENSOR_LEVEL if shared else name)
        of_phase = known if known and chosen else PhaseChoice(phase, name)
        phases.append(replace(of_phase, third="cpu" in plan.devices_of(phase) & set(devices)))
    for band in plan.bands:
        name = _set_of(plan.in_band(band), "decode", devices)
        seconds = band.predicted_s, phases[-1].device_set, band.before_s
        phases.append(PhaseChoice("decode", name, *seconds, band.depth_from, band.device))
    return tuple(phases)


def _set_of(plan: ExecutionPlan, phase: Phase, devices: Mapping[DeviceKind, Device]) -> str:
    """Return the name of what computes a phase: layer level where no matmul is cut."""
    kinds = plan.devices_of(phase) & set(devices)
    if len(kinds) == 1:
        (kind,) = kinds
        return EVERY_CORE if devices[kind].info.backend == EVERY_CORE else kind
    cut = any(len({tile.device for tile in op.tiles}) > 1 for op in plan.in_phase(phase))
    return TENSOR_LEVEL if cut else LAYER_LEVEL
