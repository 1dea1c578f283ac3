"""Quality of forms that the product does not compute, and of what a kept context loses.

python bench/quality.py forms MODEL --text FILE --calibrate OTHER -s 15% -s naive
python bench/quality.py outliers MODEL --text FILE --calibrate OTHER    # with outliers folded in
python bench/quality.py excess MODEL --calibrate FILE --text OTHER    # outliers that it lacks
python bench/quality.py formats FILE.gguf --text FILE    # weights and caches, and llama.cpp's
python bench/quality.py kept MODEL --text FILE --bits 8 --bits mixed    # keys and values
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from common import finish, new_app, table
from lab.kv_quality import RANDOM, KvQuality, kv_quality
from lab.perplexities import scores
from lab.schemes import Schemes
from parts.excess import excess
from parts.outliers import outliers

from hetero.backends.formats import WeightFormat
from hetero.compiling.calibration import calibration_sequences
from hetero.generation.llm import LLM
from hetero.measuring.evaluation import DEFAULT_WINDOW, evaluate, read_tokens

app = new_app(__doc__)
app.command("outliers")(outliers)
app.command("excess")(excess)

Text = Annotated[Path, typer.Option(help="in UTF-8")]
Limit = Annotated[int | None, typer.Option(help="score this much of the text")]
Window = Annotated[int, typer.Option(help="tokens scored at a time; 0: what fits")]


@app.command("forms")
def forms(
    model: str,
    text: Text,
    calibrate: Annotated[Path, typer.Option(help="another text")],
    scheme: Annotated[list[str], typer.Option("-s", "--scheme", help="see lab/schemes.py")],
    calibration_tokens: int = 4096,
    max_tokens: Limit = None,
    window: Window = 0,
) -> None:
    """int8 activations in the reference arithmetic, against the float model."""
    loaded, _, sequences = calibration_sequences(model, calibrate, calibration_tokens)
    tokens = read_tokens(loaded, text, max_tokens)
    size = window or min(DEFAULT_WINDOW, loaded.config.max_position)
    schemes = Schemes(loaded, sequences, size)
    rows = []
    with LLM(model, device="npu", weights="f32", kv="f32") as exact:
        for name in scheme:
            score = evaluate(schemes.model_of(name), tokens, reference=exact, window=size)
            rows.append([name, score.tokens, f"{score.perplexity:.4f}", f"{score.kl_mean:.5f}"])
    table("w8a8, simulated|tokens|perplexity|KL mean (nats)", rows)
    finish()


@app.command("formats")
def formats(
    model: Path,
    text: Text,
    weights: Annotated[list[str] | None, typer.Option(help="default: all but w8a8")] = None,
    max_tokens: Annotated[int, typer.Option(help="score this much of the text")] = 1024,
    window: Window = 256,
    device: str = "npu",
) -> None:
    """Perplexity in every format of weights and caches, and llama.cpp's (a GGUF file)."""
    with LLM(str(model), device=device) as llm:  # type: ignore[arg-type]
        tokens = read_tokens(llm, text, max_tokens)
    chosen = weights or [x.value for x in WeightFormat if x is not WeightFormat.W8A8]
    found = scores(model, tokens, chosen, device=device, window=window)
    table("weights|keys and values|perplexity", ([*x[:2], f"{x.perplexity:.4f}"] for x in found))
    finish()


@app.command("kept")
def kept(
    model: str,
    text: Text,
    bits: Annotated[list[str], typer.Option(help="see lab/kv_quality.py")],
    ratio: Annotated[float, typer.Option(help="of mixed, of the bytes at 8")] = 0.5,
    seeds: Annotated[int, typer.Option(help="random orders of layers of mixed bits")] = 0,
    weights: str | None = None,
    max_tokens: Limit = None,
    window: Window = 0,
    device: str = "npu",
) -> None:
    """The second half of each window after a context that was kept in few bits."""
    options = {"weights": weights, "device": device, "kv": "f32", "whole_caches": True}
    with LLM(model, **options) as llm:  # type: ignore[arg-type]
        tokens = read_tokens(llm, text, max_tokens)
        size = window or min(256, llm.max_seq_len)
        by_ratio = kv_quality(llm, tokens, bits, ratio=ratio, window=size, seeds=seeds)
    cells = [
        [name, f"{x.ratio:.3f}", f"{x.perplexity:.4f}", f"{x.top1_agreement:.2%}",
         f"{x.kl_mean:.6f}"]
        for name, x in by_ratio.items() if not name.startswith(RANDOM)
    ]  # fmt: skip
    table("keys and values|bytes, x those at 8 bits|perplexity|top-1 agreement|KL (nats)", cells)
    finish(*by_chance(by_ratio))


def by_chance(found: dict[str, KvQuality]) -> list[str]:
    """How many random orders of its layers `mixed` beats."""
    others = [x.kl_mean for name, x in found.items() if name.startswith(RANDOM)]
    if not others:
        return []
    better = sum(found["mixed"].kl_mean < kl for kl in others)
    return [
        f"mixed is closer than {better} of {len(others)} random orders of its layers "
        f"(KL {min(others):.6f} to {max(others):.6f})"
    ]


if __name__ == "__main__":
    app()
