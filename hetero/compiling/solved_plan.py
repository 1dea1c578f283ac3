"""The plan of a bundle by its chip's times, and the solver that answers for all other lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from hetero.backends.protocol import Capabilities
from hetero.errors import UserError
from hetero.models.bundle import SolverRecord
from hetero.profiler.cost import CostModel
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import CapabilityRecord, DeviceProfile
from hetero.runtime.prefill_mode import with_modes
from hetero.solver.plan import STEP_TOKENS
from hetero.solver.planner import with_graph_sizes
from hetero.solver.prepared import PreparedSolver, prepare_solver
from hetero.solver.request import GraphSizes

AUTO_LENGTHS: Final = (16, 64, 256, STEP_TOKENS)  # that graph sizes are chosen for


@dataclass(frozen=True)
class SolvedPlan:
    """A prepared solver whose `plan` is the bundle's, and what prepares it again.

    `profile` is the chip's with the abilities and graph sizes of the bundle. `notes` are for
    people.
    """

    profile: DeviceProfile
    record: SolverRecord
    solver: PreparedSolver
    notes: tuple[str, ...]


def solve(
    spec: ModelGraph,
    profile: DeviceProfile,
    npu: Capabilities,
    *,
    graph_sizes: tuple[int, ...],
    seq_lens: tuple[int, ...],
    longest: int,
) -> SolvedPlan:
    """Return the fastest plan that has some of every prompt on the NPU.

    Prompts have up to `longest` tokens. Without `graph_sizes` they are chosen among the profile's,
    for the lengths. Raises `PlanError`, `ProfileError` or `UserError`.
    """
    here = _for_chip(profile, npu, longest)
    lengths = seq_lens or tuple(m for m in AUTO_LENGTHS if m < longest) or (longest,)
    record = SolverRecord(seq_lens=lengths, step_tokens=min(STEP_TOKENS, longest))
    sizes: GraphSizes = graph_sizes or "auto"
    notes: tuple[str, ...] = ()
    solver = prepare_solver(spec, here, replace(record.request, graph_sizes=sizes))
    if not _uses_npu(solver):
        record = record.model_copy(update={"shared": True})
        solver = prepare_solver(spec, here, replace(record.request, graph_sizes=sizes))
        notes = (
            f"by profile {profile.name} the GPU alone is fastest for these lengths; the NPU has "
            "what costs least, since a bundle is for both",
        )
    # As it is prepared again: with these sizes, which are no question any more.
    here = with_graph_sizes(here, solver.plan.graph_sizes)
    again = prepare_solver(spec, here, record.request)
    again.plan = with_modes(again.plan, spec, CostModel(here), again, lengths=record.seq_lens)
    return SolvedPlan(here, record, again, (*notes, *solver.plan.notes))


def _for_chip(profile: DeviceProfile, npu: Capabilities, longest: int) -> DeviceProfile:
    """Return the profile with the abilities of the NPU that graphs are compiled for.

    Its own graph sizes stay, as candidates, up to the first that holds `longest` tokens. Raises
    `UserError` without times of an NPU.
    """
    record = profile.devices.get("npu")
    if record is None or "gpu" not in profile.devices:
        raise UserError(f"profile {profile.name} does not have the times of a GPU and an NPU")
    sizes = record.capabilities.graph_sizes or npu.graph_sizes
    useful = tuple(g for i, g in enumerate(sizes) if i == 0 or sizes[i - 1] < longest)
    own = CapabilityRecord.of(npu).model_copy(update={"graph_sizes": useful})
    predictors = tuple(
        x
        for x in profile.predictors
        if x.device != "npu"
        or (x.weight_format in own.weight_formats and x.order in own.operand_orders)
    )
    return profile.model_copy(
        update={
            "devices": {**profile.devices, "npu": record.model_copy(update={"capabilities": own})},
            "predictors": predictors,
        }
    )


def _uses_npu(solver: PreparedSolver) -> bool:
    """Return whether the NPU computes something of every prompt that was planned for."""
    entries = [x for x in solver.plan.ops if x.phase == "prefill" and x.m is not None]
    lengths = {x.m for x in entries}
    return all(
        any(tile.device == "npu" for x in entries if x.m == m for tile in x.tiles) for m in lengths
    )
