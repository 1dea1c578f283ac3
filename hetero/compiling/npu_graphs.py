"""`hetero compile`: every NPU graph of a plan, compiled ahead of time for a named chip."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hetero.backends.formats import CacheFormat
from hetero.backends.host.files import LONGEST_DOCUMENT_BYTES, atomic_write, read_file
from hetero.backends.host.folders import expand_user
from hetero.backends.opencl import gpu_capabilities
from hetero.backends.ops import Experts, MatMul
from hetero.backends.protocol import Capabilities, DeviceKind, WeightValue
from hetero.backends.qnn import npu_capabilities
from hetero.backends.registry import automatic_backend, find, open_device
from hetero.backends.snapdragon import DOMAIN_BYTES, Chip, find_chip
from hetero.compiling.jobs import Job, Sharing, all_jobs, mib, sharing
from hetero.compiling.limits import (
    Domain,
    Estimate,
    check_limits,
    domains_of,
    estimate,
    graphs_bytes,
    needs_sharing,
)
from hetero.compiling.solved_plan import SolvedPlan, solve
from hetero.errors import UserError
from hetero.models import LoadedModel, open_model
from hetero.models.bundle import (
    BUNDLE_FILE,
    GRAPHS_DIRECTORY,
    PLAN_FILE,
    PROFILE_FILE,
    BundleManifest,
    GraphRecord,
    find_bundle,
)
from hetero.models.manifest import is_quantised
from hetero.models.model_weights import BlockWeights, ModelWeights
from hetero.models.quantized import save
from hetero.profiler.cost import CostModel
from hetero.profiler.errors import ProfileError
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.profile_files import shipped_names
from hetero.profiler.records import DeviceProfile
from hetero.runtime.kernels import cut_weights, node_weights, stored_for
from hetero.runtime.launch_costs import check_priced
from hetero.runtime.sizes import place
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import layer_level
from hetero.solver.non_matmul_devices import what_npus_lack
from hetero.solver.placement import Placement

if TYPE_CHECKING:
    from hetero.backends.qnn.catalog import Graph
    from hetero.backends.qnn.graph_store import GraphStore

STATE_FILE = "compiling.json"
LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "USE_POLICY.md", "NOTICE")
DEFAULT_CONTEXT = 4096
Note = Callable[[int, int, str], None]


@dataclass(frozen=True)
class CompileRequest:
    """A model to compile, and its options.

    `profile` is the chip's: its times go into the bundle, and without a `plan` it is solved by
    them, for prompts of `seq_lens` tokens first. Without both, or by the `strategy` of that name,
    it is layer level: matmuls of prefill on the NPU. Graphs for devices of other speeds are added
    up to `max_bytes` (default: what the NPU can hold). With `share_weights` the graphs of all token
    counts of a weight are one file, which only a device can open: the emulator compiles what it
    needs again. None does so where one process domain could not hold the graphs otherwise.
    `whole_caches` as in `LLM`.
    """

    model: str
    soc: str
    plan: ExecutionPlan | None = None
    profile: DeviceProfile | None = None
    strategy: Literal["auto", "layer"] = "auto"
    weights: str = "w4a16"
    graph_sizes: tuple[int, ...] = ()
    seq_lens: tuple[int, ...] = ()
    max_bytes: int | None = None
    max_seq_len: int | None = None
    share_weights: bool | None = None
    whole_caches: bool = False


@dataclass(frozen=True)
class Compilation:
    """A checked request with everything that follows from it; nothing is written yet."""

    request: CompileRequest
    loaded: LoadedModel
    plan: ExecutionPlan
    placement: Placement
    sizes: tuple[int, ...]
    max_seq_len: int
    jobs: tuple[Job, ...]
    estimate: Estimate
    share_weights: bool
    domains: tuple[Domain, ...]
    solved: SolvedPlan | None = None
    notes: tuple[str, ...] = ()

    @property
    def profile(self) -> DeviceProfile | None:
        """Return the chip's times that the bundle gets."""
        return self.request.profile if self.solved is None else self.solved.profile

    def sharing(self, tokens: int) -> Sharing | None:
        """Return what the calls of a prompt share, up to the context's length (`jobs.sharing`)."""
        return sharing(self.placement, min(tokens, self.max_seq_len))

    @property
    def gpu_bytes(self) -> int:
        """Return the bytes of weights that the GPU maps from the model's file."""
        return self.placement.kernels.weight_bytes["gpu"]

    @property
    def cpu_bytes(self) -> int:
        """Return the bytes of weights that a third device packs when the model is opened."""
        return self.placement.kernels.weight_bytes.get("cpu", 0)

    def describe_memory(self) -> str:
        """Return what is in which memory, for people."""
        chip, count = find_chip(self.request.soc), len(self.domains)
        each = "a weight and all its graph sizes" if self.share_weights else "a graph"
        return (
            f"NPU: {mib(sum(x.weight_bytes for x in self.domains))} of weights in {count} of "
            f"{chip.domains} process domains of {mib(DOMAIN_BYTES)}, a context is {each}: "
            f"{'; '.join(x.describe() for x in self.domains)}. GPU: {mib(self.gpu_bytes)} of "
            f"weights, mapped from the model's file."
            + (f" CPU: {mib(self.cpu_bytes)}, packed on opening." if self.cpu_bytes else "")
        )


def prepare(request: CompileRequest) -> Compilation:
    """Open the model, list the graphs and check the chip's limits. Raises `UserError`."""
    chip = _find_chip(request.soc)
    loaded = open_model(request.model, weights=request.weights)
    length = min(request.max_seq_len or DEFAULT_CONTEXT, loaded.config.max_position)
    loaded = loaded.for_context(length)
    spec = loaded.spec(CacheFormat.F32)  # what its graphs read
    solved = _solved(request, chip, spec, length)
    if solved is None and (request.seq_lens or request.max_bytes):
        raise UserError(
            "--seq-lens and --max-size are for plans that are solved here: leave out --plan and "
            "--strategy layer, and give --profile where none is shipped for the chip"
        )
    plan = request.plan if solved is None else solved.solver.plan
    planned = () if plan is None else plan.graph_sizes
    asked = () if solved is not None else request.graph_sizes  # a plan has decoding's as well
    sizes = tuple(sorted(set(asked or planned or npu_capabilities.DEFAULT_GRAPH_SIZES)))
    if plan is None:
        plan = layer_level(spec, graph_sizes=sizes)
    plan.check_fits(spec)
    if request.profile is not None and solved is None:
        check_priced(CostModel(request.profile), spec, plan)
    npu = npu_capabilities.capabilities_of(chip, sizes)
    placement = place(
        plan,
        loaded.config,
        loaded.weights.weight_format,
        _abilities(plan, npu),
        max_seq_len=length,
        source=None if solved is None else solved.solver,
        shadows=loaded.weights.outliers(),
        whole=request.whole_caches,
    )
    if solved is None:
        jobs = tuple(all_jobs(placement, length))
    else:
        jobs, solved = _jobs_in_room(request, placement, length, solved)
    if not jobs:
        raise UserError("the plan runs nothing on the NPU, so there is nothing to compile")
    _check_formats(chip, npu, jobs)
    shared = _shares(request, jobs)
    check_limits(jobs, sizes, chip, shared=shared)
    return Compilation(
        request,
        loaded,
        plan,
        placement,
        sizes,
        length,
        jobs,
        estimate(jobs, loaded.weights.nbytes, shared=shared),
        shared,
        domains_of(jobs, shared=shared),
        solved,
        _where(placement) if solved is None else solved.notes,
    )


def _where(placement: Placement) -> tuple[str, ...]:
    """Return what a plan that was given says of routed experts and of what NPUs lack."""
    nodes = placement.graph.nodes
    routed = [(x, len(x.op.own)) for x in nodes if isinstance(x.op, Experts)]
    npu = sum(count for x, count in routed if placement.devices(x) == {"npu"})
    total = sum(count for _, count in routed)
    notes = [f"routed experts: {npu} of {total} on the NPU, the rest on the GPU"] if total else []
    return (*notes, *filter(None, (what_npus_lack(placement.graph),)))


def _abilities(plan: ExecutionPlan, npu: Capabilities) -> dict[DeviceKind, Capabilities]:
    """Return the capabilities of the plan's devices; a CPU's as the runtime opens it."""
    able: dict[DeviceKind, Capabilities] = {"npu": npu, "gpu": gpu_capabilities.capabilities_of()}
    if "cpu" in plan.devices():
        with open_device(automatic_backend("cpu"), kind="cpu") as device:
            able["cpu"] = device.capabilities
    return able


def prepare_by_default(request: CompileRequest) -> Compilation:
    """Do the same as `prepare`, by the shipped profile of the chip.

    It is layer level, with a note, where there is none or it does not know the model's formats.
    """
    if request.plan is not None or request.profile is not None or request.strategy == "layer":
        return prepare(request)
    chip = _find_chip(request.soc)
    name = chip.profile_name
    remedy = "give --profile with one that was taken on the device"
    if name not in shipped_names():
        why = f"no profile of {chip.title} is shipped: {remedy}"
    else:
        profile = DeviceProfile.load(name)
        if request.weights in {x.weight_format for x in profile.predictors if x.device == "npu"}:
            try:
                return prepare(replace(request, profile=profile))
            except ProfileError as error:
                why = f"profile {name} does not fit ({error}): {remedy}"
        else:
            why = f"profile {name} has no times of {request.weights}: {remedy}"
    note = f"layer level, matmuls of prompts on the NPU, because {why}"
    made = prepare(request)
    return replace(made, notes=(note, *made.notes))


def _solved(
    request: CompileRequest, chip: Chip, spec: ModelGraph, longest: int
) -> SolvedPlan | None:
    """Return the plan by the chip's times; None where one was given, or there are no times."""
    if request.plan is not None or request.profile is None or request.strategy == "layer":
        return None
    sizes = request.graph_sizes or npu_capabilities.DEFAULT_GRAPH_SIZES
    once = request.share_weights is not False
    npu = npu_capabilities.capabilities_of(chip, sizes, shared_weights=once)
    return solve(
        spec,
        request.profile,
        npu,
        graph_sizes=request.graph_sizes,
        seq_lens=request.seq_lens,
        longest=longest,
    )


def _jobs_in_room(
    request: CompileRequest, placement: Placement, length: int, solved: SolvedPlan
) -> tuple[tuple[Job, ...], SolvedPlan]:
    """Return the graphs, with those that devices of other speeds ask for where they fit.

    Raises `UserError` for a `max_bytes` that the others exceed.
    """
    jobs = tuple(all_jobs(placement, length, solved.solver.plan.graph_sizes))
    shared, chip = _shares(request, jobs), find_chip(request.soc)
    small = request.max_bytes is None or graphs_bytes(jobs, shared=shared) <= request.max_bytes
    if small and len(domains_of(jobs, shared=shared)) <= chip.domains:
        return jobs, solved
    jobs = tuple(all_jobs(placement, length))
    needed = graphs_bytes(jobs, shared=_shares(request, jobs))
    if request.max_bytes is not None and needed > request.max_bytes:
        raise UserError(
            f"--max-size {mib(request.max_bytes)} is less than the {mib(needed)} of the graphs "
            "that prompts and answers need: give more, or fewer --graph-sizes"
        )
    record = solved.record.model_copy(update={"adapts": False})
    return jobs, replace(solved, record=record)


def _shares(request: CompileRequest, jobs: Sequence[Job]) -> bool:
    """Return whether the graphs of a weight are one file: as asked for, or where it is needed."""
    return needs_sharing(jobs) if request.share_weights is None else request.share_weights


def _find_chip(soc: str) -> Chip:
    """Raise `UserError` for an unknown chip, or where there is no compiler."""
    try:
        chip = find_chip(soc)
    except ValueError as error:
        raise UserError(str(error)) from None
    if find("qnn").missing_packages():
        raise UserError(f"Qualcomm's compiler is not installed: {find('qnn').install_hint}")
    return chip


def _check_formats(chip: Chip, npu: Capabilities, jobs: Sequence[Job]) -> None:
    """Raise `UserError` where the plan has NPU rows in a format that the NPU does not take."""
    for job in jobs:
        ops = [job.op] if job.group is None else [node.op for node in job.group.nodes]
        for op in ops:
            if isinstance(op, MatMul | Experts) and op.weight_format not in npu.weight_formats:
                raise UserError(
                    f"{job.name}: {chip.name} computes no {op.weight_format} matmuls: choose "
                    f"--weights {' or '.join(npu.weight_formats)}"
                )


def compile_model(plan: Compilation, out: Path, note: Note | None = None) -> BundleManifest:
    """Write the bundle. `note(done, total, name)` follows each graph.

    An interrupted compilation continues; finished graphs are verified, not compiled again. Raises
    `UserError`, `DeviceError`.
    """
    from hetero.backends.qnn.device import QnnDevice
    from hetero.backends.qnn.opening import open as open_qnn

    state, out = _state(plan), expand_user(out).resolve()  # the compiler works in other folders
    _begin(plan, out, state)
    stored = open_model(out, weights=plan.request.weights).for_context(plan.max_seq_len)
    atomic_write(out / PLAN_FILE, plan.plan.model_dump_json(indent=1) + "\n")
    if plan.profile is not None:
        plan.profile.save(out / PROFILE_FILE)
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
    atomic_write(out / BUNDLE_FILE, manifest.document())
    (out / STATE_FILE).unlink(missing_ok=True)
    return manifest


def _state(plan: Compilation) -> dict[str, Any]:
    """Return the facts that an unfinished directory must match to be continued."""
    return {
        "model": plan.loaded.fingerprint,
        "soc": plan.request.soc.lower(),
        "weights": plan.request.weights,
        "plan": plan.plan.plan_id,
        "sizes": list(plan.sizes),
        "max_seq_len": plan.max_seq_len,
        "share_weights": plan.share_weights,
        **({"whole_caches": True} if plan.request.whole_caches else {}),
        **({} if plan.profile is None else {"profile": plan.profile.fingerprint}),
        **({} if plan.solved is None else {"solver": plan.solved.record.model_dump(mode="json")}),
    }


def _begin(plan: Compilation, out: Path, state: Mapping[str, Any]) -> None:
    """Return the directory with the model's weights, new or begun by the same command."""
    previous = _read_state(out)
    if previous is not None and previous != state:
        raise UserError(
            f"{out}: was begun with another model, chip, plan or size: choose another directory"
        )
    if previous is None:
        if find_bundle(out) is not None:
            raise UserError(f"{out}: already holds a compiled model: choose another directory")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out}: is not empty: choose another directory")
    _check_space(plan, out)
    if not is_quantised(out):
        if previous is not None:
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
    """Compile layer by layer, releasing each layer's weights; shared graphs are compiled once."""
    entries: dict[str, tuple[list[str], GraphRecord]] = {}
    done = 0
    for layer, jobs in _by_layer(plan.jobs).items():
        block = None if layer is None else stored.weights.block(layer)
        for job in jobs:
            graphs, alike = _graphs(job, block, stored.weights)
            together = plan.share_weights and alike and len(graphs) > 1
            for group in [graphs] if together else [[graph] for graph in graphs]:
                path = store.compile_shared(group) if together else store.compile(*group[0])
                record = _record(path, group)
                entries.setdefault(path.name, ([], record))[0].extend(job.names)
            done += job.graphs
            note(done, plan.estimate.graphs, job.name)
        if layer is not None:
            stored.weights.release(layer)
    return [record.model_copy(update={"nodes": tuple(n)}) for n, record in entries.values()]


def _graphs(
    job: Job, block: BlockWeights | None, weights: ModelWeights
) -> tuple[list[Graph], bool]:
    """Return the graphs of a job, and whether they have weights and differ only in token counts."""
    from hetero.backends.qnn import catalog

    if job.group is not None:
        each = [node_weights(node, block, weights) for node in job.group.nodes]
        digest = catalog.group_digest(each)
        return catalog.all_group_graphs(job.group.group, job.sizes, each, digest), False
    values: Mapping[str, WeightValue] = node_weights(job.node, block, weights, besides=True)
    if job.segment is not None:
        assert isinstance(job.op, MatMul)
        assert isinstance(job.node.op, MatMul)
        own = stored_for(job.op, job.node.op, values)
        values = cut_weights(own, *job.segment.rows)
    if isinstance(job.op, Experts):
        (values,) = catalog.each_expert(job.op, values)
    digest = catalog.constants_digest(job.op, values)
    return catalog.all_graphs(job.op, job.sizes, values, digest), bool(digest)


def _record(path: Path, graphs: Sequence[Graph]) -> GraphRecord:
    from hetero.backends.qnn.graph_store import read_entry

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
    layers: dict[int | None, list[Job]] = {}
    for job in jobs:
        layers.setdefault(job.node.layer, []).append(job)
    return layers


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
        plan_sha256=_sha256(out / PLAN_FILE),
        profile_sha256="" if plan.profile is None else _sha256(out / PROFILE_FILE),
        solver=None if plan.solved is None else plan.solved.record,
        whole_caches=plan.request.whole_caches,
        graphs=tuple(records),
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _licence(loaded: LoadedModel, out: Path) -> str:
    files = [name for name in LICENCE_FILES if (out / name).is_file()]
    if files:
        return "see " + ", ".join(files)
    return "random weights" if loaded.source is None else "not stated in the model's directory"
