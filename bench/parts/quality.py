"""What each weight format costs in quality."""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from common import DATA, finish, table

from hetero import LLM
from hetero.compiling.calibration import calibrated
from hetero.measuring.evaluation import evaluate, read_tokens
from hetero.models import open_model
from hetero.models.quantized import save

DEMO_SOURCES = DATA.parents[1] / "docs" / "demo-model"
FORMATS = ("f16", "w8a16", "w4a16", "w4a8")
CALIBRATION_TOKENS = 8192
SCORED_TOKENS = 6000
LEARNING_RATE = 3e-4
ROW_TOKENS = 256
BATCH_ROWS = 8
SEED = 7


def stories(split: str, seed: int, count: int) -> str:
    """Stories of the demo model's grammar."""
    sys.path.insert(0, str(DEMO_SOURCES))
    from corpus import documents  # type: ignore[import-not-found]

    return "\n".join(itertools.islice(documents(seed, split), count))


def float_demo(folder: Path, steps: int) -> Path:
    """The demo model trained on in floats: a Hugging Face directory."""
    import torch
    import torch.nn.functional as nnf

    sys.path.insert(0, str(DEMO_SOURCES))
    from export import write_checkpoint  # type: ignore[import-not-found]
    from model import Llama, LlamaShape  # type: ignore[import-not-found]
    from tokenizers import Tokenizer

    torch.manual_seed(SEED)
    demo = open_model("demo", weights="f32")
    assert demo.source is not None
    model = Llama(LlamaShape())
    numbers = {name: torch.from_numpy(np.array(x)) for name, x in state_of(demo).items()}
    model.load_state_dict(numbers, strict=True)
    ids = demo.tokenizer.encode(stories("train", SEED, max(40, steps * 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    rows = torch.tensor(ids[: len(ids) // (ROW_TOKENS + 1) * (ROW_TOKENS + 1)])
    rows = rows.reshape(-1, ROW_TOKENS + 1)
    for step in range(steps):
        batch = rows[torch.arange(BATCH_ROWS).add(step * BATCH_ROWS) % len(rows)]
        loss = nnf.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        print(f"\rstep {step + 1}/{steps}, loss {loss.item():.3f}", end="", file=sys.stderr)
    print(file=sys.stderr)
    write_checkpoint(model, Tokenizer.from_file(str(demo.source / "tokenizer.json")), folder)
    return folder


def state_of(demo: Any) -> dict[str, Any]:
    """The demo model's numbers under PyTorch's names."""
    weights, config = demo.weights, demo.config
    found = {"model.embed_tokens.weight": weights.embed().dequantize(),
             "model.norm.weight": weights.final_norm()}  # fmt: skip
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for i in range(config.num_layers):
        block, prefix = weights.block(i), f"model.layers.{i}."
        parts = [*np.split(block.qkv.dequantize(), [q, q + kv]), block.o.dequantize(),
                 *np.split(block.gate_up.dequantize(), 2), block.down.dequantize()]  # fmt: skip
        names = [f"self_attn.{x}_proj" for x in "qkvo"]
        names += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
        names += ["input_layernorm", "post_attention_layernorm"]
        parts += [block.input_norm, block.post_norm]
        found |= {f"{prefix}{x}.weight": part for x, part in zip(names, parts, strict=True)}
    return found


def own_texts(model: Path, seed: int, count: int) -> str:
    """Texts of a model at temperature 1."""
    with LLM(str(model), device="npu", weights="f32") as llm:
        bos = llm.model.tokenizer.bos_id
        start = [1 if bos is None else bos]
        options: dict[str, Any] = {"max_tokens": 400, "temperature": 1.0}
        texts = [llm.generate(start, seed=seed + i, **options).text for i in range(count)]
    return "\n".join(texts)


def score(model: Path, calibration: str, scored: str, folder: Path, most: int) -> None:
    """Print every format of a model, as `hetero eval` does."""
    text, sample, chosen = folder / "scored.txt", folder / "sample.txt", folder / "calibrated"
    text.write_text(scored, encoding="utf-8")
    sample.write_text(calibration, encoding="utf-8")
    save(calibrated(str(model), "w4a16", sample, CALIBRATION_TOKENS), chosen)
    runs = [(name, model, name) for name in FORMATS]
    runs += [(f"{name}, calibrated", chosen, name) for name in ("w4a16", "w4a8")]
    rows = []
    with LLM(str(model), device="npu", weights="f32") as exact:
        tokens, window = read_tokens(exact, text, most), min(512, exact.max_seq_len)
        perplexity = evaluate(exact, tokens, window=window).perplexity
        rows.append(["f32", f"{perplexity:.4f}", "", "", ""])
        for name, path, weights in runs:
            with LLM(str(path), device="npu", weights=weights) as llm:
                x = evaluate(llm, tokens, reference=exact, window=window)
            compared = f"{x.top1_agreement:.2%}", f"{x.kl_mean:.6f}", f"{x.kl_p99:.5f}"
            rows.append([name, f"{x.perplexity:.4f}", *compared])
    table("weights|perplexity|top-1 agreement|KL mean (nats)|KL p99", rows)


def quality(
    stories260k: Annotated[
        Path | None, typer.Option("--stories", help="directory of stories260K")
    ] = None,
    steps: Annotated[int, typer.Option(help="of training the demo on in floats")] = 80,
    tokens: Annotated[int, typer.Option(help="that are scored, at most")] = SCORED_TOKENS,
) -> None:
    """What each weight format costs: perplexity, agreement and KL divergence against float32.

    Of 4 bits also with weights chosen by `hetero quantize --calibrate` (GPTQ). The demo model is
    shipped as the 4-bit weights that it was trained through, so it is trained on in floats for a
    few steps to have something to round, then scored on held-out stories. For stories260K the texts
    are its own at temperature 1; calibration and scoring have other seeds.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        demo = float_demo(folder / "demo", steps)
        print(f"measured; demo, trained on for {steps} steps in floats, held-out stories\n")
        score(demo, stories("train", 11, 60), stories("held_out", 12, 60), folder, tokens)
    if stories260k is not None:
        with tempfile.TemporaryDirectory() as name:
            texts = [own_texts(stories260k, seed, 20) for seed in (100, 200)]
            print(f"\nmeasured; {stories260k.name}, its own texts\n")
            score(stories260k, texts[0], texts[1], Path(name), tokens)
    finish()
