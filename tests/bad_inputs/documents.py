"""Plans, profiles, journals and manifests that a file system or a person has spoilt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetero.profiler.profile_files import shipped_path
from tests.bad_inputs.case import OPEN_QUANTISED, BadInput, Change, json_set

REPORT = ("report", "{work}/document.json", "--out", "{work}/r.html")
PLAN = ("plan", "llama-3-8b", "--profile", "{work}/document.json", "--seq-lens", "64")
RUN = ("generate", "{dir}", "hi", "--plan", "{work}/document.json")
SMALL_PLAN: dict[str, Any] = {
    "model": "tiny",
    "non_matmul": {"prefill": "npu", "decode": "npu"},
    "ops": [
        {"phase": "prefill", "m": 8, "op": "o", "n": 8, "k": 8, "strategy": "npu-only",
         "predicted_s": 1e-5, "npu_s": 1e-5,
         "tiles": [{"device": "npu", "tokens": [0, 8], "rows": [0, 8]}]}
    ],
    "totals": [
        {"phase": "prefill", "m": 8, "predicted_s": 1e-3, "tokens_per_s": 8e3,
         "best_single_device_s": 1e-3}
    ],
}  # fmt: skip
Edit = Callable[[dict[str, Any]], Any]


def plan(edit: Edit) -> Change:
    """A small plan, edited."""

    def change(work: Path) -> None:
        document = json.loads(json.dumps(SMALL_PLAN))
        edit(document)
        (work / "document.json").write_text(json.dumps(document), encoding="utf-8")

    return change


def profile(edit: Edit, name: str = "snapdragon-8-gen-3") -> Change:
    """A shipped profile, edited."""

    def change(work: Path) -> None:
        document = json.loads(shipped_path(name).read_text(encoding="utf-8"))
        edit(document)
        (work / "document.json").write_text(json.dumps(document), encoding="utf-8")

    return change


def no_time(document: dict[str, Any]) -> None:
    """A plan whose times are all zero."""
    document["ops"][0] |= {"predicted_s": 0.0, "npu_s": 0.0}
    document["totals"][0] |= {"predicted_s": 0.0, "best_single_device_s": 0.0}


def total(**values: Any) -> Change:
    return plan(lambda x: x["totals"][0].update(values))


def entry(**values: Any) -> Change:
    return plan(lambda x: x["ops"][0].update(values))


def curves(document: dict[str, Any]) -> None:
    point = {"m": 8, "seconds": 1.0}
    document["curves"] = [
        {"strategy": "auto", "points": [point, {"m": 9, "seconds": 2.0}]},
        {"strategy": "layer", "points": [point]},
    ]


def far_future(document: dict[str, Any]) -> None:
    """Reference points at a moment that no clock tells apart from a second later."""
    point = {"device": "gpu", "phase": "decode", "seconds": 1e-3}
    document["references"] = [point | {"at_s": 0.0}, point | {"at_s": 1e40}]


def no_half(document: dict[str, Any]) -> None:
    document["name"] = "\ud800"


def huge(document: dict[str, Any]) -> None:
    document["predictors"][0]["model"]["bandwidth_bytes_per_s"] = 1e-25


def graphs(document: dict[str, Any]) -> None:
    document["devices"]["npu"]["capabilities"]["graph_sizes"] = list(range(1, 100))


PLANS: tuple[tuple[str, Change, tuple[str, ...], str], ...] = (
    ("all times zero", plan(no_time), REPORT, "ops.0.predicted_s: Input should be greater than"),
    ("a total of nothing", total(predicted_s=0), REPORT, "totals.0.predicted_s"),
    ("a total without end", total(predicted_s=1e300), REPORT, "totals.0.predicted_s"),
    ("a total of no tokens", total(m=0), REPORT, "totals.0.m"),
    ("a rate of 0", total(tokens_per_s=0), REPORT, "totals.0.tokens_per_s"),
    ("a negative time", entry(npu_s=-1), REPORT, "ops.0.npu_s"),
    ("rows beyond 32 bits", entry(n=2**40), RUN, "ops.0.n: Input should be less than"),
    ("rows beyond 1000 digits", entry(n=10**1000), RUN, "is not valid"),
    ("tokens beyond 32 bits", entry(m=2**40), RUN, "ops.0.m: Input should be less than"),
    ("features of a text", entry(k="x"), RUN, "ops.0.k: Input should be a valid integer"),
    ("curves of other lengths", plan(curves), REPORT, "the curves have points at other lengths"),
    ("memory of a negative size", plan(lambda x: x.update(memory_bytes=-1)), REPORT,
     "memory_bytes"),
    ("a share of 2", plan(lambda x: x.update(max_gpu_share=2)), RUN, "max_gpu_share"),
    ("of another model", entry(op="qkv"), RUN, "make a plan for this model"),
    ("calls that are not the prompt", total(steps=[3]), REPORT, "are no prompt of"),
    ("in a format of other weights", plan(lambda x: x["ops"][0]["tiles"][0].update(precision="q8")),
     RUN, "precision"),
    ("on weights of another format",
     plan(lambda x: [op["tiles"][0].update(precision="w8a16") for op in x["ops"]]),
     RUN, "make a plan for these --weights"),
)  # fmt: skip
PROFILES: tuple[tuple[str, Change, tuple[str, ...], str], ...] = (
    ("a moment beyond all clocks", profile(far_future), PLAN, "is damaged at references.1.at_s"),
    ("half of a character", profile(no_half), PLAN, "is not JSON"),
    ("100 graph sizes", profile(graphs), PLAN, "is damaged at devices.npu.capabilities"),
    ("a memory of no speed", profile(huge), PLAN, "s for a kernel: it is damaged"),
    ("a graph of no tokens", profile(lambda x: x["devices"]["npu"]["capabilities"].update(
        graph_sizes=[0])), PLAN, "is damaged at devices.npu.capabilities.graph_sizes.0"),
)  # fmt: skip
MANIFEST = "quantised/hetero.json"
FILE = {"size_bytes": 1, "sha256": "0" * 64}
MANIFESTS: tuple[tuple[str, Change, str], ...] = (
    ("another kind", json_set(MANIFEST, {"kind": "x"}), "kind must be 'hetero-quantized'"),
    ("of the future", json_set(MANIFEST, {"schema_version": 99}), "upgrade hetero"),
    ("no files", json_set(MANIFEST, {"files": {}}), "files must list"),
    ("files outside", json_set(MANIFEST, {"files": {"../x": FILE, "config.json": FILE,
                                                    "weights.safetensors": FILE}}), "../x"),
)  # fmt: skip
COMPILED = "quantised/compiled.json"


def compiled(**values: Any) -> Change:
    """A compiled model's manifest beside a quantised model, edited."""

    def change(work: Path) -> None:
        document: dict[str, Any] = {
            "model": "tiny", "licence": "none", "soc": "sm8650", "htp_arch": 75, "sdk": "2",
            "provider": "2", "max_seq_len": 64, "graph_sizes": [1, 32], "plan_id": "p",
            "plan_sha256": "0" * 64, "graphs": [],
        }  # fmt: skip
        (work / COMPILED).write_text(json.dumps(document | values), encoding="utf-8")

    return change


RUN_COMPILED = ("generate", "{quantised}", "hi", "--max-tokens", "1")
BUNDLES: tuple[tuple[str, Change, str], ...] = (
    ("no tokens", compiled(max_seq_len=0), "compiled.json: max_seq_len: Input should be greater"),
    ("tokens without end", compiled(graph_sizes=[2**40]), "compiled.json: graph_sizes.0"),
    ("without its plan", compiled(), "plan.json: cannot be read"),
)

CASES = [
    *(BadInput(f"plan: {n}", s, words, change) for n, change, words, s in PLANS),
    *(BadInput(f"profile: {n}", s, words, change) for n, change, words, s in PROFILES),
    *(BadInput(f"manifest: {n}", s, OPEN_QUANTISED, change) for n, change, s in MANIFESTS),
    *(BadInput(f"bundle: {n}", s, RUN_COMPILED, change) for n, change, s in BUNDLES),
]
