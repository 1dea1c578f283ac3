"""What each weight format costs in quality: `python bench/quantisation.py [--stories DIR]`.

For the demo model and for a Hugging Face directory (stories260K): perplexity, top-1 agreement and
KL divergence against the same model in float32, for every format, and for 4 bits also with weights
chosen by `hetero quantize --calibrate` (GPTQ) instead of rounding to nearest. Each row is what
`hetero eval MODEL --text FILE --weights FORMAT` prints.

The demo model was trained through 4-bit weights and is shipped as these, so nothing is lost by
rounding it again. To have floats to round, it is trained on from the shipped weights for a few
steps without that (`--steps`), on stories of other seeds. It is then scored on held-out stories.
For stories260K the texts are its own at temperature 1; calibration and scoring have other seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hetero import LLM
from hetero.compiling.calibration import calibrated
from hetero.measuring.evaluation import Evaluation, evaluate, read_tokens
from hetero.models import open_model
from hetero.models.quantized import save

DEMO_SOURCES = Path(__file__).parent / "demo_model"
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
    model.load_state_dict(state_of(demo), strict=True)
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
    import torch

    config, found = demo.config, {}
    found["model.embed_tokens.weight"] = demo.weights.embed().dequantize()
    found["model.norm.weight"] = demo.weights.final_norm()
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for i in range(config.num_layers):
        block, prefix = demo.weights.block(i), f"model.layers.{i}."
        parts = [*np.split(block.qkv.dequantize(), [q, q + kv]), block.o.dequantize()]
        found |= {
            f"{prefix}self_attn.{n}_proj.weight": x for n, x in zip("qkvo", parts, strict=True)
        }
        parts = [*np.split(block.gate_up.dequantize(), 2), block.down.dequantize()]
        names = ("gate", "up", "down")
        found |= {f"{prefix}mlp.{n}_proj.weight": x for n, x in zip(names, parts, strict=True)}
        found[f"{prefix}input_layernorm.weight"] = block.input_norm
        found[f"{prefix}post_attention_layernorm.weight"] = block.post_norm
    return {name: torch.from_numpy(np.array(value)) for name, value in found.items()}


def own_texts(model: Path, seed: int, count: int) -> str:
    """Texts of a model at temperature 1."""
    with LLM(str(model), device="npu", weights="f32") as llm:
        bos = llm.model.tokenizer.bos_id
        start = [1 if bos is None else bos]
        texts = [
            llm.generate(start, max_tokens=400, temperature=1.0, seed=seed + i).text
            for i in range(count)
        ]
    return "\n".join(texts)


def rows(model: Path, calibration: str, scored: str, folder: Path) -> dict[str, Evaluation]:
    """Every format of a model."""
    text, sample = folder / "scored.txt", folder / "calibration.txt"
    text.write_text(scored, encoding="utf-8")
    sample.write_text(calibration, encoding="utf-8")
    found: dict[str, Evaluation] = {}
    with LLM(str(model), device="npu", weights="f32") as exact:
        tokens = read_tokens(exact, text, SCORED_TOKENS)
        window = min(512, exact.max_seq_len)
        found["f32"] = evaluate(exact, tokens, window=window)

        def score(name: str, path: Path, weights: str) -> None:
            with LLM(str(path), device="npu", weights=weights) as llm:
                found[name] = evaluate(llm, tokens, reference=exact, window=window)

        for weights in FORMATS:
            score(weights, model, weights)
        chosen = calibrated(str(model), "w4a16", sample, CALIBRATION_TOKENS)
        save(chosen, folder / "calibrated")
        for weights in ("w4a16", "w4a8"):
            score(f"{weights}, calibrated", folder / "calibrated", weights)
    return found


def table(found: dict[str, Evaluation]) -> str:
    """As `hetero eval` prints it."""
    lines = ["| weights | perplexity | top-1 agreement | KL mean (nats) | KL p99 |"]
    lines.append("|---|---:|---:|---:|---:|")
    for name, x in found.items():
        compared = "| | | |"
        if x.kl_mean is not None and x.top1_agreement is not None:
            compared = f"| {x.top1_agreement:.2%} | {x.kl_mean:.6f} | {x.kl_p99:.5f} |"
        lines.append(f"| {name} | {x.perplexity:.4f} {compared}")
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stories", type=Path, help="directory of stories260K")
    parser.add_argument("--steps", type=int, default=80, help="of training the demo on in floats")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        demo = float_demo(folder / "demo", options.steps)
        found = rows(demo, stories("train", 11, 60), stories("held_out", 12, 60), folder)
        print(
            f"demo, trained on for {options.steps} steps in floats, held-out stories, measured:\n"
        )
        print(table(found), flush=True)
        print(json.dumps({k: v.tokens for k, v in found.items()}), file=sys.stderr)
    if options.stories is not None:
        with tempfile.TemporaryDirectory() as name:
            texts = [own_texts(options.stories, seed, 20) for seed in (100, 200)]
            found = rows(options.stories, *texts, Path(name))
            print(f"\n{options.stories.name}, its own texts, measured:\n")
            print(table(found))


if __name__ == "__main__":
    main()
