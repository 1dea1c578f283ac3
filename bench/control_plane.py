"""What a decoding step costs beyond its kernels, and a saved model to its first token.

python bench/control_plane.py --weights w4a8 --profile host
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from common import (
    CONTEXT,
    LLAMA,
    Tokens,
    context_of,
    finish,
    one_command,
    run_prompt,
    table,
    timed,
    timeline,
    timing,
)

from hetero.backends.protocol import KINDS
from hetero.generation.llm import LLM
from hetero.models import open_model
from hetero.models.quantized import save
from hetero.runtime.engine import Engine

FIRST_TOKEN = """
import sys, time
start = time.perf_counter()
import hetero
with hetero.LLM(sys.argv[1], device=sys.argv[2], weights=sys.argv[3]) as llm:
    llm.generate([1] * 32, max_tokens=1)
    print(time.perf_counter() - start)
"""


def computing_s(engine: Engine) -> float:
    """Seconds of the last step in which any device computed; where both did it counts once."""
    total = end = 0.0
    for span in sorted(timeline(engine), key=lambda span: span.start_s):
        if span.what in KINDS:
            total += max(0.0, span.end_s - max(span.start_s, end))
            end = max(end, span.end_s)
    return total


def decode_overhead(llm: LLM, tokens: int) -> tuple[float, float]:
    """Median wall and computing seconds of a decoding step behind 256 tokens."""
    engine, context = llm.engine, context_of(llm.engine)
    with timing(engine):
        run_prompt(engine, CONTEXT)
        steps = range(tokens + 4)
        found = [(timed(lambda: engine.decode(context, 5)), computing_s(engine)) for _ in steps]
    walls, computes = zip(*found[4:], strict=True)
    return statistics.median(walls), statistics.median(computes)


def first_token(model: str, weights: str, rounds: int) -> list[float]:
    """Seconds from start of the import to the first token of a saved model, in fresh processes.

    Modules are compiled once, as in an installation, whatever this shell's variables say.
    """
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as folder:
        loaded, path = open_model(model, weights=weights), Path(folder) / "model"
        save(loaded.weights, path, name=loaded.name)
        command = [sys.executable, "-P", "-c", FIRST_TOKEN, str(path), "hetero", weights]
        options: dict[str, Any] = {"capture_output": True, "text": True, "env": environ}
        runs = [subprocess.run(command, check=True, **options) for _ in range(rounds)]
    return [float(done.stdout.split()[-1]) for done in runs]


def control_plane(
    model: str = LLAMA,
    weights: str = "w4a8",
    profile: Annotated[str | None, typer.Option(help="for tensor level")] = None,
    n: Tokens = 32,
) -> None:
    """What a decoding step costs beyond its kernels, and a saved model to its first token.

    Control plane: the part of a step in which no device computes. A device computes from OpenCL's
    own start to its end of every kernel, and while a call of ONNX Runtime blocks.
    """
    modes: dict[str, dict[str, Any]] = {
        "gpu": {"device": "gpu"},
        "npu": {"device": "npu"},
        "layer level": {"device": "hetero", "strategy": "layer", "profile": profile},
        "tensor level": {"device": "hetero", "profile": profile},
    }

    def rows() -> Iterator[list[str]]:
        for name, options in modes.items():
            with LLM(model, weights=weights, adapt=False, **options) as llm:
                wall, compute = decode_overhead(llm, n)
            shown = f"{1e3 * wall:.2f}", f"{1e3 * compute:.2f}", f"{(wall - compute) / wall:.1%}"
            yield [name, *shown]

    print(f"{model}, {weights}, measured\n")
    table("device|decode step ms|of it computing ms|control plane", rows())
    shown = ", ".join(f"{value:.2f}" for value in first_token(model, weights, 3))
    finish(f"saved model to its first token, fresh process, 1st to 3rd: {shown} s\n")


app = one_command(control_plane)

if __name__ == "__main__":
    app()
