"""Decode with every matmul cut at one share, with and without gates, beside the single devices.

    python bench/gates.py [--weights w4a8] [--share 0.66] [--rest gpu,npu] [-n 10] [-r 8]

All variants take turns round by round after a context of 256 tokens. A cut engine keeps its kernels
and has two programs of the same step. No solver and no profile are involved.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field

import numpy as np

from hetero.measuring.benchmark import environment
from hetero.models import LoadedModel, open_model
from hetero.placement.device_set import open_devices
from hetero.runtime.engine import Engine
from hetero.runtime.step import Step
from hetero.solver.handmade import single_device
from hetero.solver.model_spec import ModelSpec
from hetero.solver.plan import ExecutionPlan, OpPlan, Rest, Tile

CONTEXT = 256


@dataclass
class Variant:
    """An engine with one program of its decode step; seconds of every step but a round's first."""

    name: str
    engine: Engine
    step: Step
    seconds: list[float] = field(default_factory=list)

    def measure(self, tokens: int) -> None:
        """One round."""
        self.engine.truncate(CONTEXT)
        for gates in (False, True):  # whatever the engine asks for
            self.engine._steps["decode", 1, 1, gates] = self.step
        for i in range(tokens):
            start_s = time.perf_counter()
            self.engine.decode(5 + i)
            if i > 0:
                self.seconds.append(time.perf_counter() - start_s)


def cut(spec: ModelSpec, share: float, rest: str) -> ExecutionPlan:
    """Row-cut of every matmul, the GPU's share of the rows last."""
    entries = []
    for matmul in spec.matmuls:
        rows = round(matmul.n * (1 - share) / 32) * 32
        for phase, m in (("prefill", None), ("decode", 1)):
            tokens = (0, None if matmul.name == "lm_head" else m)
            tiles = [
                Tile.model_validate(
                    {"device": device, "tokens": tokens, "rows": span, "graph_size": None}
                )
                for device, span in (("npu", (0, rows)), ("gpu", (rows, matmul.n)))
            ]
            fields = {"phase": phase, "m": tokens[1], "op": matmul.name, "n": matmul.n}
            fields |= {"k": matmul.k, "strategy": "row-cut", "tiles": tiles}
            entries.append(OpPlan.model_validate(fields))
    placed = Rest.model_validate({"prefill": rest, "decode": rest})
    return ExecutionPlan(model=spec.name, ops=tuple(entries), rest=placed)


def variants(name: str, loaded: LoadedModel, plan: ExecutionPlan) -> list[Variant]:
    """An engine's program as it is without gates and, where both devices work, with them."""
    kinds = plan.devices()
    opened = open_devices("hetero" if len(kinds) == 2 else next(iter(kinds)))
    engine = Engine(
        loaded.weights,
        plan,
        opened.devices,
        max_seq_len=2 * CONTEXT,
        control_core=opened.control_core,
    )
    engine.prefill(np.random.default_rng(0).integers(3, 1000, CONTEXT).tolist())
    found = []
    for gates in (False, True) if len(kinds) == 2 else (False,):
        bell = engine.devices["gpu"].doorbell() if gates else None
        engine.synchroniser.bells = {} if bell is None else {"gpu": bell}
        step = engine._lowering.lower("decode", 1, 1, gates=gates)
        found.append(Variant(f"{name}{' gates' if gates else ''}", engine, step))
    return found


def main() -> None:
    """Parse, measure, print a Markdown table and the environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:llama-3.2-1b")
    parser.add_argument("--weights", default="w4a8")
    parser.add_argument(
        "--share", default="0.66", help="of the rows, for the GPU; several: 0.6,0.7"
    )
    parser.add_argument("--rest", default="gpu,npu")
    parser.add_argument("-n", type=int, default=10)
    parser.add_argument("-r", type=int, default=8)
    arguments = parser.parse_args()
    loaded = open_model(arguments.model, weights=arguments.weights)
    spec = loaded.spec()
    found = [v for k in ("gpu", "npu") for v in variants(k, loaded, single_device(spec, k))]
    for share in arguments.share.split(","):
        for rest in arguments.rest.split(","):
            plan = cut(spec, float(share), rest)
            found += variants(f"{share} on the GPU, rest on the {rest}", loaded, plan)
    for _ in range(arguments.r):
        for variant in found:
            variant.measure(arguments.n)
    best = min(float(np.median(v.seconds)) for v in found[:2])
    print("| decode | ms (median) | lower quartile | min | × best single (medians) |")
    print("|---|---:|---:|---:|---:|")
    for variant in found:
        ms = 1e3 * np.array(variant.seconds)
        print(
            f"| {variant.name} | {np.median(ms):.2f} | {np.quantile(ms, 0.25):.2f} | "
            f"{ms.min():.2f} | {1e3 * best / np.median(ms):.3f} |"
        )
    print(f"\nmeasured; {arguments.model} {arguments.weights}; {json.dumps(environment())}")
    for variant in found:
        variant.engine.close()


if __name__ == "__main__":
    main()
