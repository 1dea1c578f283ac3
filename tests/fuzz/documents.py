"""Fuzz targets of the documents that commands hand to each other: plans, profiles, journals,
manifests of quantised and of compiled models.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
import zlib
from functools import cache
from pathlib import Path
from typing import Any

from hetero.backends import reference
from hetero.backends.host.clock import ManualClock
from hetero.backends.protocol import Device, DeviceKind
from hetero.models import LoadedModel, open_model
from hetero.models.bundle import BUNDLE_FILE, BundleManifest, GraphRecord, find_bundle
from hetero.models.manifest import MANIFEST_FILE
from hetero.models.quantized import save
from hetero.placement.planning import load_either
from hetero.profiler import journal
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.non_matmul_ops import ReferenceBlock
from hetero.profiler.options import Event
from hetero.profiler.profile_files import shipped_path
from hetero.profiler.records import DeviceProfile
from hetero.profiler.report import to_html
from hetero.profiler.session import profile_devices
from hetero.runtime.engine import Engine
from hetero.solver.build import make_plan
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.prepared import prepare_solver
from hetero.solver.request import PlanRequest
from tests.fuzz.target import SEPARATOR, Target
from tests.profiler.fakes import devices, options
from tests.support import tiny_files

try:
    from hetero.backends.qnn import graph_store as store
except ImportError:  # no Hexagon's compiler here
    store = None  # type: ignore[assignment]

GRAPHS = (1, 8, 32)
SHORT = PlanRequest(seq_lens=(8, 20))
DRAWN = PlanRequest(seq_lens=(8, 20), curves=True)
WORDS = (
    "gpu", "npu", "prefill", "decode", "qkv", "gate_up", "down", "lm_head", "w4a16", "f32",
    "row-cut", "hybrid-cut", "plain", "swapped", "Attention", "MatMul", "weights", "graph",
)  # fmt: skip


def one_in(count: int, data: bytes) -> bool:
    """Whether these bytes are among those that something slow is done with."""
    return zlib.crc32(data) % count == 0


@cache
def small_profile() -> DeviceProfile:
    """A whole profile of the null devices, without most of its rows."""
    clock = ManualClock()
    full = profile_devices(devices(clock), options(pairs=((512, 512), (1024, 512))), clock=clock)
    return full.model_copy(update={"matmuls": full.matmuls[::16], "others": full.others[:2]})


@contextlib.contextmanager
def quietly() -> Any:
    """Numbers that overflow on the way are no finding; what comes of them may be."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _OfAModel(Target):
    """Documents that are used together with a tiny model."""

    dictionary = WORDS

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.model: LoadedModel = open_model(str(tiny_files.write_directory(folder / "model")))
        self.spec: ModelGraph = self.model.spec()


class Plan(_OfAModel):
    """A plan: drawn in every way, and run by a model that it fits."""

    name = "plan"

    def seeds(self) -> list[bytes]:
        profile = small_profile()
        cut = make_plan(self.model.spec(), profile, PlanRequest(seq_lens=(20,), explain=False))
        drawn = make_plan(self.model.spec(), profile, DRAWN)
        return [x.model_dump_json(indent=1).encode() for x in (cut, drawn)]

    def use(self, data: bytes) -> None:
        path = self.folder / "plan.json"
        path.write_bytes(data)
        plan = load_either(str(path))
        if not isinstance(plan, ExecutionPlan):
            return
        for ending in ("html", "md", "json"):
            plan.report(self.folder / f"report.{ending}", compare=[plan])
        assert ExecutionPlan.load(self.folder / "report.json").plan_id == plan.plan_id
        plan.check_fits(self.spec)
        self.run(plan)

    def run(self, plan: ExecutionPlan) -> None:
        """A prompt and two tokens on numpy's devices."""
        both: dict[DeviceKind, Device] = {
            "gpu": reference.open(kind="gpu", asynchronous=True),
            "npu": reference.open(kind="npu", graph_sizes=GRAPHS),
        }
        used = {kind: device for kind, device in both.items() if kind in plan.devices()}
        with quietly(), Engine(self.model.weights, plan, used, max_seq_len=40) as engine:
            context = engine.new_context()
            engine.prefill(context, list(range(5, 25)))
            engine.decode(context, 7)


class Profile(_OfAModel):
    """A profile: planned by, and now and then drawn."""

    name = "profile"

    def seeds(self) -> list[bytes]:
        return [
            json.dumps(small_profile().model_dump(mode="json")).encode(),
            shipped_path("snapdragon-8-gen-3").read_bytes(),
        ]

    def use(self, data: bytes) -> None:
        path = self.folder / "profile.json"
        path.write_bytes(data)
        profile = load_either(str(path))
        if not isinstance(profile, DeviceProfile):
            return
        with quietly():
            make_plan(self.spec, profile, DRAWN if one_in(64, data) else SHORT)
            prepare_solver(self.spec, profile, SHORT).plan_for(13)
            if one_in(64, data):
                to_html(profile)


class Journal(Target):
    """The journal of a run that was interrupted, and goes on. Lines are signed anew, as one that
    was made by hand would be.
    """

    name = "journal"
    dictionary = ("header", "base", "row", "part", "reference", "spent", "quarantine", *WORDS)

    def seeds(self) -> list[bytes]:
        out = self.folder / "seed.json"
        with contextlib.suppress(KeyboardInterrupt):
            self._profile(out, resume=False, stop_after=4)
        path = journal.journal_path(out)
        assert path is not None
        entries = journal.read_entries(path)
        path.unlink()
        out.unlink(missing_ok=True)
        return [SEPARATOR.join(json.dumps(entry).encode() for entry in entries)]

    def use(self, data: bytes) -> None:
        out = self.folder / "profile.json"
        path = journal.journal_path(out)
        assert path is not None
        path.write_bytes(b"".join(_signed(part) for part in data.split(SEPARATOR)))
        most = 10_000 if one_in(32, data) else 3
        with contextlib.suppress(KeyboardInterrupt), quietly():
            self._profile(out, resume=True, stop_after=most, counted="")

    def _profile(
        self, out: Path, *, resume: bool, stop_after: int, counted: str = "matmuls"
    ) -> None:
        """Measure; interrupted at so many events of a kind (empty: of any)."""
        clock, seen = ManualClock(), 0

        def progress(event: Event) -> None:
            nonlocal seen
            seen += event.what.startswith(counted)
            if seen == stop_after:
                raise KeyboardInterrupt

        small = options(
            pairs=((512, 512),),
            tokens=(1, 8, 32),
            blocks=(ReferenceBlock(64, 64, 2, 1, 32),),
            quick=True,
        )
        profile_devices(
            devices(clock), small, out=out, resume=resume, clock=clock, progress=progress
        )


def _signed(part: bytes) -> bytes:
    try:
        entry = json.loads(part)
        return journal.to_line(entry).encode() if isinstance(entry, dict) else part + b"\n"
    except (ValueError, RecursionError):
        return part + b"\n"


class Manifest(Target):
    """`hetero.json` of a quantised directory whose other files are good."""

    name = "manifest"
    dictionary = ("w4a16", "w8a16", "q4", "bytes", "files", "weights.safetensors", "..", "/")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        tiny_files.write_directory(folder / "model")
        save(open_model(folder / "model").weights, folder / "quantised")

    def seeds(self) -> list[bytes]:
        return [(self.folder / "quantised" / MANIFEST_FILE).read_bytes()]

    def use(self, data: bytes) -> None:
        (self.folder / "quantised" / MANIFEST_FILE).write_bytes(data)
        model = open_model(self.folder / "quantised", verify=True)
        model.weights.block(0)
        model.weights.embed()
        model.encode("the café")


class Bundle(Target):
    """`compiled.json` of a compiled directory, and an entry of its graphs, one behind the other."""

    name = "bundle"
    dictionary = ("sm8650", "graph.onnx", "graph_qnn.bin", "../x", "files", "identity", "target")

    def seeds(self) -> list[bytes]:
        files = {"graph.onnx": "0" * 64, "graph_qnn.bin": "1" * 64}
        record = GraphRecord(
            nodes=("layer0.qkv",), tokens=(32,), context=0, entry="e" * 40, size_bytes=5,
            files=files,
        )  # fmt: skip
        manifest = BundleManifest(
            model="tiny", licence="none", soc="sm8650", htp_arch=75, sdk="2", provider="2",
            max_seq_len=64, graph_sizes=(1, 32), plan_id="p", plan_sha256="0" * 64,
            graphs=(record,),
        )  # fmt: skip
        identity = {"operation": "MatMul", "tokens": 32, "context": 0, "weights": ""}
        entry = {"identity": identity, "target": {"chip": "sm8650"}, "files": files, "nbytes": 5,
                 "graphs": 1, "format": 1}  # fmt: skip
        return [manifest.model_dump_json().encode() + SEPARATOR + json.dumps(entry).encode()]

    def use(self, data: bytes) -> None:
        whole, _, entry = data.partition(SEPARATOR)
        if store is not None:
            self._use_entry(entry)
        (self.folder / BUNDLE_FILE).write_bytes(whole)
        manifest = find_bundle(self.folder)
        assert manifest is not None
        assert manifest.graphs_bytes >= 0
        manifest.npu_options(self.folder)

    def _use_entry(self, entry: bytes) -> None:
        shutil.rmtree(self.folder / "entry", ignore_errors=True)
        (self.folder / "entry").mkdir()
        (self.folder / "entry" / store.ENTRY).write_bytes(entry)
        with contextlib.suppress(store.DamagedEntryError):
            store.check_files(self.folder / "entry", store.read_entry(self.folder / "entry"))
