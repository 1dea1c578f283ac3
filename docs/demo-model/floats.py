"""Trains the shipped demo model on without its 4-bit weights, so that there are floats to round.

Writes a Hugging Face directory, and beside it stories to calibrate with (`calibration.txt`) and
held-out ones to score (`scored.txt`): what docs: files.md says of the weight formats' quality. With
`--outliers` channels are grown first (`bench/lab/outliers.py`) and the model is trained on with
them, so that they are its own (docs/explanation/w8a8.md).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from corpus import Split, documents
from export import write_checkpoint
from model import Llama, LlamaShape
from tokenizers import Tokenizer

from hetero.models import open_model

sys.path.append(str(Path(__file__).parents[2]))
from bench.lab.outliers import OutlyingWeights

LEARNING_RATE = 3e-4
# Where a channel is 2^8 times as large, so is what a step of its weights does.
OUTLYING_RATE = 1e-5
ROW_TOKENS = 256
BATCH_ROWS = 8
SEED = 7


def stories(split: Split, seed: int, count: int) -> str:
    """Stories of the grammar."""
    return "\n".join(itertools.islice(documents(seed, split), count))


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


def trained_on(demo: Any, steps: int, rate: float = LEARNING_RATE) -> Llama:
    """The model after some steps in float32."""
    torch.manual_seed(SEED)
    model = Llama(LlamaShape())
    numbers = {name: torch.from_numpy(np.array(x)) for name, x in state_of(demo).items()}
    model.load_state_dict(numbers, strict=True)
    ids = demo.tokenizer.encode(stories("train", SEED, max(40, steps * 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
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
    return model


def main(argv: list[str] | None = None) -> int:
    """Trains on and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--outliers", action="store_true", help="grow channels before training")
    options = parser.parse_args(argv)
    demo, rate = open_model("demo", weights="f32"), LEARNING_RATE
    assert demo.source is not None
    if options.outliers:
        demo, rate = replace(demo, weights=OutlyingWeights(demo.weights, 1)), OUTLYING_RATE
    model = trained_on(demo, options.steps, rate)
    write_checkpoint(model, Tokenizer.from_file(str(demo.source / "tokenizer.json")), options.out)
    texts = {"calibration": stories("train", 11, 60), "scored": stories("held_out", 12, 60)}
    for name, text in texts.items():
        (options.out / f"{name}.txt").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
