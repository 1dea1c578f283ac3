"""Small random models on every kind of plan, for tests of contexts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from hetero import LLM
from hetero.models import open_model
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import single_device
from tests.runtime.plans import random_plan

GRAPHS = (1, 2, 4, 8, 32, 64)
VOCABULARY = 263
# name: (device kinds, backends)
WAYS: dict[str, dict[str, Any]] = {
    "gpu": {"gpu": "opencl"},
    "npu": {"npu": "ort-cpu"},
    "tensor level": {"gpu": "opencl", "npu": "ort-cpu"},
    "tensor level, rest on the npu": {"gpu": "opencl", "npu": "ort-cpu"},
    "reference npu": {"npu": "reference"},
}


def plan_of(folder: Path, way: str) -> ExecutionPlan:
    """All on one device, or every matmul cut."""
    spec = open_model(str(folder), weights="f32").spec()
    if len(WAYS[way]) == 1:
        return single_device(spec, next(iter(WAYS[way])))  # type: ignore[arg-type]
    non_matmul = "npu" if "rest" in way else "gpu"
    return random_plan(
        spec,
        40,
        GRAPHS,
        random.Random(3),
        strategies=["hybrid-cut", "row-cut"],
        non_matmul=non_matmul,
    )


def open_llm(folder: Path, way: str, **options: Any) -> LLM:
    """The model on that plan, or on another one for the same devices."""
    given: dict[str, Any] = {"max_seq_len": 120, "plan": plan_of(folder, way), "kv": "f32"}
    return LLM(str(folder), weights="f32", **WAYS[way], **(given | options))
