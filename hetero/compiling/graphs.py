"""`hetero compile`: every NPU graph of a plan, compiled ahead of time for a named chip."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero.backends.host.files import LONGEST_DOCUMENT_BYTES, atomic_write, read_file
from hetero.backends.ops import MatMul
from hetero.backends.protocol import WeightValue
from hetero.backends.registry import find
from hetero.backends.snapdragon import find_chip
from hetero.backends.weights import PackedWeight, packed_bytes
from hetero.compiling.bundle import (
    BUNDLE_FILE,
    GRAPHS_DIRECTORY,
    PLAN_FILE,
    BundleManifest,
    GraphRecord,
    find_bundle,
)
from hetero.compiling.limits import Estimate, Job, check_limits, estimate, mib
from hetero.errors import UserError
from hetero.models import LoadedModel, open_model
from hetero.models.graph import model_graph
from hetero.models.manifest import is_quantised
from hetero.models.quantized import save
from hetero.models.weights import BlockWeights, ModelWeights
from hetero.profiler.model_graph import Node
from hetero.runtime.engine import SCORING_PIECE
from hetero.runtime.kernels import node_weights
from hetero.solver.calls import padded_size
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.groups import NodeGroup, node_groups
from hetero.solver.handmade import layer_level
from hetero.solver.plan import PHASES, Phase

if TYPE_CHECKING:
    from hetero.backends.qnn.catalog import Graph
    from hetero.backends.qnn.store import GraphStore

STATE_FILE = "compiling.json"
LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "USE_POLICY.md", "NOTICE")
DEFAULT_CONTEXT = 4096
Note = Callable[[int, int, str], None]


@dataclass(frozen=True)
class CompileRequest:
    """What to compile. `plan` None is layer level: matmuls of prefill on the NPU.

    With `share_weights` the graphs of all token counts of a weight are one file, which only a
    device can open: the emulator compiles what it needs again.
    """

    model: str
    soc: str
    plan: ExecutionPlan | None = None
    weights: str = "w4a16"
    graph_sizes: tuple[int, ...] = ()
    max_seq_len: int | None = None
    share_weights: bool = False


@dataclass(frozen=True)
class Compilation:
    """A request with everything that it implies, checked; nothing is written yet."""

    request: CompileRequest
    loaded: LoadedModel
    plan: ExecutionPlan
    sizes: tuple[int, ...]
    max_seq_len: int
    jobs: tuple[Job, ...]
    estimate: Estimate


def prepare(request: CompileRequest) -> Compilation:
    """Open the model, make the list of graphs and check the chip's limits. Raises `UserError`."""
    _check_chip(request.soc, request.weights)
    from hetero.backends.qnn import DEFAULT_GRAPH_SIZES

    loaded = open_model(request.model, weights=request.weights)
    spec = loaded.spec()
    planned = request.plan.graph_sizes if request.plan is not None else ()
    sizes = tuple(sorted(set(request.graph_sizes or planned or DEFAULT_GRAPH_SIZES)))
    plan = request.plan or layer_level(spec, graph_sizes=sizes)
    plan.check_fits(spec)
    length = min(request.max_seq_len or DEFAULT_CONTEXT, loaded.config.max_position)
    longest = plan.for_graphs({"npu": sizes, "gpu": ()}).step_tokens or max(sizes)
    capacity = length + padded_size(longest, [*sizes, longest])  # as the engine's caches
    nodes = model_graph(loaded.config, request.weights, capacity=capacity).nodes
    jobs = tuple(all_jobs(plan, nodes, sizes))
    if not jobs:
        raise UserError("the plan runs nothing on the NPU, so there is nothing to compile")
    check_limits(jobs, sizes, shared=request.share_weights)
    taken = estimate(jobs, loaded.weights.nbytes, shared=request.share_weights)
    return Compilation(request, loaded, plan, sizes, length, jobs, taken)


def all_jobs(plan: ExecutionPlan, nodes: Sequence[Node], sizes: Sequence[int]) -> Iterator[Job]:
    """Graphs of every node, or of the groups that the plan wants as one graph."""
    groups = node_groups(nodes, plan.fused)
    inside = {node.name: group for group in groups.values() for node in group.nodes}
    for node in nodes:
        group = inside.get(node.name)
        phases = [] if group is None else _fused_phases(plan, group)
        if group is not None and phases and group.nodes[0] is node:
            yield _group_job(plan, group, phases, sizes)
        if len(phases) < len(PHASES):
            yield from node_jobs(_without(plan, phases), node, sizes)


def _fused_phases(plan: ExecutionPlan, group: NodeGroup) -> list[Phase]:
    """Phases in which the plan has all of a group, whole, on the NPU."""
    names = {node.plan_op for node in group.nodes if node.plan_op is not None}
    rest = {"prefill": plan.rest.prefill, "decode": plan.rest.decode}
    found: list[Phase] = []
    for phase in PHASES:
        entries = [entry for entry in plan.ops if entry.phase == phase and entry.op in names]
        whole = {entry.op for entry in entries if [t.device for t in entry.tiles] == ["npu"]}
        if rest[phase] == "npu" and whole == names and len(entries) >= len(names):
            found.append(phase)
    return found


def _without(plan: ExecutionPlan, phases: Sequence[Phase]) -> ExecutionPlan:
    """The plan with nothing on the NPU in some phases."""
    left = tuple(entry for entry in plan.ops if entry.phase not in phases)
    rest = plan.rest.model_copy(update=dict.fromkeys(phases, "gpu"))
    return plan.model_copy(update={"ops": left, "rest": rest})


def _group_job(
    plan: ExecutionPlan, group: NodeGroup, phases: Sequence[Phase], sizes: Sequence[int]
) -> Job:
    matmuls = [node.op for node in group.nodes if isinstance(node.op, MatMul)]
    counts: set[int] = set()
    for phase in phases:
        part = plan.model_copy(update={"ops": tuple(e for e in plan.ops if e.phase == phase)})
        first = next(node for node in group.nodes if node.plan_op is not None)
        assert isinstance(first.op, MatMul)
        counts.update(*(job.sizes for job in node_jobs(part, first, sizes)))
    attention, copies = group.group.attention, 1
    if attention is not None:
        from hetero.backends.qnn.catalog import contexts

        copies = len(contexts(attention.capacity, 1))
    nbytes = sum(_weight_bytes(op) for op in matmuls)
    node = group.nodes[0]
    return Job(node, node.op, None, tuple(sorted(counts)), nbytes, group, copies)


def node_jobs(plan: ExecutionPlan, node: Node, sizes: Sequence[int]) -> Iterator[Job]:
    """Graphs of a node that the plan runs on the NPU, segment by segment."""
    if node.plan_op is None:
        phases = {plan.rest.prefill: tuple(sizes)} if plan.rest.prefill == "npu" else {}
        if plan.rest.decode == "npu":
            phases.setdefault("npu", (padded_size(1, sizes),))
        if "npu" in phases:
            yield Job(node, node.op, None, phases["npu"], 0)
        return
    assert isinstance(node.op, MatMul)
    for (start, stop), counts in _segments(plan, node.plan_op, node.op.n, sizes).items():
        part = replace(node.op, n=stop - start)
        yield Job(node, part, (start, stop), counts, _weight_bytes(part))


def _segments(
    plan: ExecutionPlan, op: str, n: int, sizes: Sequence[int]
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Rows between the plan's cut points that the NPU computes, with their token counts."""
    tiles = [(entry.phase, tile) for entry in plan.ops if entry.op == op for tile in entry.tiles]
    cuts = sorted({0, n, *(row for _, tile in tiles for row in tile.rows)})
    found: dict[tuple[int, int], set[int]] = {}
    for phase, tile in tiles:
        if tile.device != "npu":
            continue
        counts = {tile.graph_size} if tile.graph_size else _token_counts(op, phase, sizes)
        for part in pairwise(cuts):
            if tile.rows[0] <= part[0] and part[1] <= tile.rows[1]:
                found.setdefault(part, set()).update(count for count in counts if count)
    return {part: tuple(sorted(counts)) for part, counts in sorted(found.items())}


def _token_counts(op: str, phase: str, sizes: Sequence[int]) -> set[int]:
    """Graph sizes that a matmul meets: the head sees one row, or a piece when text is scored."""
    if op == "lm_head":
        return {padded_size(rows, sizes) for rows in (1, min(SCORING_PIECE, max(sizes)))}
    return {padded_size(1, sizes)} if phase == "decode" else set(sizes)


def _weight_bytes(op: MatMul) -> int:
    return packed_bytes(op.weight_format.storage, op.n, op.k)


def _check_chip(soc: str, weights: str) -> None:
    """Raise `UserError` for an unknown chip, a format that it does not take, or no compiler."""
    try:
        chip = find_chip(soc)
    except ValueError as error:
        raise UserError(str(error)) from None
    if find("qnn").missing_packages():
        raise UserError(f"Qualcomm's compiler is not installed: {find('qnn').install_hint}")
    from hetero.backends.qnn.device import weight_formats

    formats = weight_formats(chip)
    if weights not in formats:
        raise UserError(
            f"{soc} computes no {weights} matmuls: choose --weights {' or '.join(formats)}"
        )


def compile_model(plan: Compilation, out: Path, note: Note | None = None) -> BundleManifest:
    """Write the bundle. `note(done, total, name)` follows each graph.

    An interrupted compilation goes on where it was; finished graphs are verified, not made again.
    Raises `UserError`, `DeviceError`.
    """
    from hetero.backends.qnn import QnnDevice
    from hetero.backends.qnn import open as open_qnn

    state, out = _state(plan), out.expanduser().resolve()  # the compiler works in other folders
    _begin(plan, out, state)
    stored = open_model(out, weights=plan.request.weights)
    atomic_write(out / PLAN_FILE, plan.plan.model_dump_json(indent=1) + "\n")
    device = open_qnn(
        soc=plan.request.soc,
        graph_sizes=plan.sizes,
        cache=out / GRAPHS_DIRECTORY,
        ahead=True,
    )
    assert isinstance(device, QnnDevice)
    with device:
        records = _compile_all(plan, stored, device.store, note or (lambda *_: None))
        manifest = _manifest(plan, out, device.store, records)
    atomic_write(out / BUNDLE_FILE, manifest.model_dump_json(indent=1) + "\n")
    (out / STATE_FILE).unlink(missing_ok=True)
    return manifest


def _state(plan: Compilation) -> dict[str, Any]:
    """What a directory must have been begun for, to be gone on with."""
    return {
        "model": plan.loaded.fingerprint,
        "soc": plan.request.soc.lower(),
        "weights": plan.request.weights,
        "plan": plan.plan.plan_id,
        "sizes": list(plan.sizes),
        "max_seq_len": plan.max_seq_len,
        "share_weights": plan.request.share_weights,
    }


def _begin(plan: Compilation, out: Path, state: Mapping[str, Any]) -> None:
    """The directory with the model's weights in it, new or begun by the same command."""
    found = _read_state(out)
    if found is not None and found != state:
        raise UserError(
            f"{out}: was begun with another model, chip, plan or size: choose another directory"
        )
    if found is None:
        if find_bundle(out) is not None:
            raise UserError(f"{out}: already holds a compiled model: choose another directory")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out}: is not empty: choose another directory")
    _check_space(plan, out)
    if not is_quantised(out):
        if found is not None:
            shutil.rmtree(out)
        save(plan.loaded.weights, out, name=plan.loaded.name)
        _copy_licences(plan.loaded, out)
    atomic_write(out / STATE_FILE, json.dumps(state))


def _read_state(out: Path) -> Any:
    try:
        return json.loads(read_file(out / STATE_FILE, LONGEST_DOCUMENT_BYTES))
    except (OSError, ValueError, RecursionError):
        return None


def _check_space(plan: Compilation, out: Path) -> None:
    parent = next(p for p in (out, *out.absolute().parents) if p.exists())
    needed = plan.estimate.graphs_bytes + plan.estimate.weights_bytes
    if is_quantised(out):
        needed = 0
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise UserError(f"{out}: needs {mib(needed)}, but {mib(free)} are free: make room")


def _copy_licences(loaded: LoadedModel, out: Path) -> None:
    for name in LICENCE_FILES if loaded.source else ():
        assert loaded.source is not None
        if (loaded.source / name).is_file():
            shutil.copyfile(loaded.source / name, out / name)


def _compile_all(
    plan: Compilation, stored: LoadedModel, store: GraphStore, note: Note
) -> list[GraphRecord]:
    """Layer by layer, releasing each layer's weights; graphs that nodes share are made once."""
    entries: dict[str, tuple[list[str], GraphRecord]] = {}
    done = 0
    for layer, jobs in _by_layer(plan.jobs).items():
        block = None if layer is None else stored.weights.block(layer)
        for job in jobs:
            graphs, alike = _graphs(job, block, stored.weights)
            together = plan.request.share_weights and alike and len(graphs) > 1
            for group in [graphs] if together else [[graph] for graph in graphs]:
                path = store.compile_shared(group) if together else store.compile(*group[0])
                record = _record(path, group)
                entries.setdefault(path.name, ([], record))[0].append(job.name)
            done += job.graphs
            note(done, plan.estimate.graphs, job.name)
        if layer is not None:
            stored.weights.release(layer)
    return [record.model_copy(update={"nodes": tuple(n)}) for n, record in entries.values()]


def _graphs(
    job: Job, block: BlockWeights | None, weights: ModelWeights
) -> tuple[list[Graph], bool]:
    """Graphs of a job, and whether they differ in their token counts alone, with weights."""
    from hetero.backends.qnn import catalog

    if job.group is not None:
        each = [node_weights(node, block, weights) for node in job.group.nodes]
        digest = catalog.group_digest(each)
        return catalog.all_group_graphs(job.group.group, job.sizes, each, digest), False
    values = _rows(node_weights(job.node, block, weights), job.rows)
    digest = catalog.constants_digest(job.op, values)
    return catalog.all_graphs(job.op, job.sizes, values, digest), bool(digest)


def _record(path: Path, graphs: Sequence[Graph]) -> GraphRecord:
    from hetero.backends.qnn.store import read_entry

    entry = read_entry(path)
    return GraphRecord(
        nodes=(),
        tokens=tuple(graph.identity.tokens for graph in graphs),
        context=graphs[0].identity.context,
        entry=path.name,
        size_bytes=entry.nbytes,
        files=entry.files,
    )


def _by_layer(jobs: Sequence[Job]) -> dict[int | None, list[Job]]:
    found: dict[int | None, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.node.layer, []).append(job)
    return found


def _rows(
    values: Mapping[str, WeightValue], rows: tuple[int, int] | None
) -> dict[str, WeightValue]:
    """The rows of a segment of every weight of a matmul."""
    if rows is None:
        return dict(values)
    start, stop = rows
    return {
        name: value.rows(start, stop) if isinstance(value, PackedWeight) else value[start:stop]
        for name, value in values.items()
    }


def _manifest(
    plan: Compilation, out: Path, store: GraphStore, records: Sequence[GraphRecord]
) -> BundleManifest:
    chip, library = store.target.chip, store.target.library
    return BundleManifest(
        model=plan.loaded.name,
        licence=_licence(plan.loaded, out),
        soc=chip.name,
        htp_arch=chip.htp_arch,
        sdk=library.sdk,
        provider=library.wheel,
        max_seq_len=plan.max_seq_len,
        graph_sizes=plan.sizes,
        plan_id=plan.plan.plan_id,
        plan_sha256=hashlib.sha256((out / PLAN_FILE).read_bytes()).hexdigest(),
        graphs=tuple(records),
    )


def _licence(loaded: LoadedModel, out: Path) -> str:
    files = [name for name in LICENCE_FILES if (out / name).is_file()]
    if files:
        return "see " + ", ".join(files)
    return "random weights" if loaded.source is None else "not stated in the model's directory"
