"""Operand orders of a matmul on the NPU, by the compiler's schedules (the paper's figure 5)."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import typer
from common import finish, table

from hetero.backends.onnx_common.builder import GraphBuilder
from hetero.backends.qnn.graph_store import GraphIdentity
from hetero.backends.qnn.library import load
from hetero.backends.qnn.optrace import Schedule, ScheduleStore
from hetero.backends.qnn.session import Target
from hetero.backends.snapdragon import find_chip

MIB = 2**20
F16 = np.float16


def matmul(m: int, n: int, k: int, *, constant: bool, transposed: bool) -> bytes:
    """A matmul in fp16, [m, k] × [k, n], or its transpose, [n, k] × [k, m]; the weight is a
    constant of the graph or an input.
    """
    graph = GraphBuilder()
    x, y = graph.input("x", F16, (m, k)), graph.output("y", F16, (m, n))
    shape = (n, k) if transposed else (k, n)
    if constant:
        weight = graph.constant(np.random.default_rng(0).standard_normal(shape).astype(F16))
    else:
        weight = graph.input("w", F16, shape)
    if transposed:
        flipped = graph.node("Transpose", x, perm=[1, 0])
        graph.node("Transpose", graph.node("MatMul", weight, flipped), out=y, perm=[1, 0])
    else:
        graph.node("MatMul", x, weight, out=y)
    return graph.model(21)


def cells(schedule: Schedule) -> list[str]:
    """Traffic of the computing units and of DRAM."""
    return [f"{schedule.vtcm_bytes / MIB:.0f}", f"{schedule.dram_bytes / MIB:.0f}"]


def orders(
    soc: str = "sm8650",
    shapes: Annotated[
        str, typer.Option(help="n×k, as 2048x2048,4096x4096")
    ] = "2048x2048,4096x4096",
    tokens: Annotated[str, typer.Option("-m", help="token counts")] = "32,256",
) -> None:
    """Both operand orders, of weights that are constants of a graph and of weights as inputs.

    The paper permutes operands because the NPU is up to six times slower in one order. The
    compiler lays constants out itself, so that `qnn`, whose weights are constants, has no order to
    choose.
    """
    rows = []
    with TemporaryDirectory() as folder:
        store = ScheduleStore(Target(load(), find_chip(soc)), Path(folder))
        for shape in shapes.split(","):
            n, k = map(int, shape.split("x"))
            for m in map(int, tokens.split(",")):
                for constant in (True, False):
                    row = [f"{n} × {k}", str(m), "constant" if constant else "input"]
                    for transposed in (False, True):
                        name = f"{shape} {constant} {transposed}"
                        row += cells(
                            store.find(
                                GraphIdentity(name, m),
                                lambda m=m, n=n, k=k, c=constant, t=transposed: matmul(  # type: ignore[misc]
                                    m, n, k, constant=c, transposed=t
                                ),
                            )
                        )
                    rows.append(row)
        store.close()
    print(f"emulated; schedules of the compiler for {soc}, fp16, MiB moved by a call\n")
    table("n × k|m|weight|plain: VTCM|DRAM|transposed: VTCM|DRAM", rows)
    finish()
