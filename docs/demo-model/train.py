"""Trains the demo model on the prepared ids; resumable, one thread, plain CPU.

State (weights, optimisers, step) is written atomically every minute and on SIGTERM, so the run
may be killed at any time and started again with the same command.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as nnf
from model import Llama, LlamaShape
from prepare import SEED, Rows
from torch import Tensor, nn

# Marks places that carry no loss; the model reads them as token 0.
PAD = -1


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result, besides the corpus and the shape."""

    batch_tokens: int = 4096
    total_steps: int = 2100
    # Muon trains the matrices, AdamW the embedding and the gains.
    peak_lr: float = 2.5e-3
    embedding_lr_factor: float = 0.5
    final_lr: float = 5e-5
    warmup_steps: int = 120
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    # At first every document is alone in its row: with another story before it, whose hero, thing
    # and place compete, the model takes far longer to learn to keep to its own.
    packed_part: float = 0.35
    # The last part runs with 4-bit weights forward, so that storing them costs almost nothing.
    quantised_part: float = 0.15

    def lr(self, step: int) -> float:
        """Linear warmup, then a cosine down to the final rate."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.final_lr + (self.peak_lr - self.final_lr) * cosine

    def is_packed(self, step: int) -> bool:
        """Whether `step` trains on rows of several documents."""
        return step >= self.total_steps * (1 - self.packed_part)

    def is_quantised(self, step: int) -> bool:
        """Whether `step` trains through 4-bit weights."""
        return step >= self.total_steps * (1 - self.quantised_part)


def loss_of(model: Llama, rows: Tensor) -> Tensor:
    """Mean next-token cross-entropy in nats over rows [B, T + 1]."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(rows[:, :-1].clamp_min(0))
    return nnf.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), ignore_index=PAD)


def to_tensor(rows: Rows) -> Tensor:
    """Rows as the int64 ids that torch embeds."""
    return torch.from_numpy(rows.astype(np.int64))


class Batches:
    """The batches of the run, a pure function of the step number."""

    def __init__(self, work_dir: Path, batch_tokens: int) -> None:
        self.rows: Rows = np.load(work_dir / "train.npy")
        self.batch_rows = batch_tokens // (self.rows.shape[1] - 1)
        packed = np.load(work_dir / "documents.npz")
        self.ids, lengths = packed["ids"], packed["lengths"].astype(np.int64)
        self.starts = np.concatenate(([0], np.cumsum(lengths)))
        self.groups = group_by_length(lengths, batch_tokens)

    def packed(self, step: int) -> Tensor:
        """Rows of several documents: [B, T + 1]."""
        first = step * self.batch_rows % (len(self.rows) - self.batch_rows + 1)
        return to_tensor(self.rows[first : first + self.batch_rows])

    def single(self, step: int) -> Tensor:
        """One document per row, filled with PAD: [B, T + 1]."""
        group = self.groups[step % len(self.groups)]
        documents = [
            to_tensor(self.ids[self.starts[index] : self.starts[index + 1]]) for index in group
        ]
        return nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=PAD)


def group_by_length(lengths: npt.NDArray[np.int64], batch_tokens: int) -> list[list[int]]:
    """Batches of document numbers of about equal length, so that little is padding."""
    rng = random.Random(SEED)
    groups: list[list[int]] = []
    for first in range(0, len(lengths), 1000):
        order = sorted(range(first, min(first + 1000, len(lengths))), key=lambda i: int(lengths[i]))
        chunk: list[list[int]] = [[]]
        for index in order:
            if (len(chunk[-1]) + 1) * lengths[index] > batch_tokens:
                chunk.append([])
            chunk[-1].append(index)
        rng.shuffle(chunk)
        groups += chunk
    return groups


def held_out_loss(model: Llama, rows: Rows, *, batch_rows: int = 10) -> float:
    """Mean cross-entropy in nats over all rows."""
    with torch.no_grad():
        parts = [
            float(loss_of(model, to_tensor(rows[start : start + batch_rows])))
            for start in range(0, len(rows), batch_rows)
        ]
    return sum(parts) / len(parts)


class Trainer:
    """One training run and its state on disk."""

    def __init__(self, work_dir: Path, recipe: Recipe, clock: Callable[[], float]) -> None:
        torch.manual_seed(SEED)
        self.recipe = recipe
        self.clock = clock
        self.state_path = work_dir / "state.pt"
        self.log_path = work_dir / "train_log.jsonl"
        self.batches = Batches(work_dir, recipe.batch_tokens)
        self.held_out_rows: Rows = np.load(work_dir / "held_out.npy")
        self.model = Llama(LlamaShape())
        self.optimizers = self._make_optimizers()
        self.step = 0
        self.tokens = 0
        self.elapsed_s = 0.0
        self.is_stopping = False
        if self.state_path.exists():
            self._load()

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        matrices = [p for p in self.model.model.layers.parameters() if p.ndim == 2]
        embedding = [self.model.model.embed_tokens.weight]
        gains = [p for p in self.model.parameters() if p.ndim == 1]
        recipe = self.recipe
        groups: list[dict[str, Any]] = [
            {"params": embedding, "weight_decay": 0.0, "lr_factor": recipe.embedding_lr_factor},
            {"params": gains, "weight_decay": 0.0, "lr_factor": 1.0},
        ]
        adamw = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), fused=True)
        muon = torch.optim.Muon(
            matrices, lr=1.0, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        muon.param_groups[0]["lr_factor"] = 1.0
        return [adamw, muon]

    def _load(self) -> None:
        state = torch.load(self.state_path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens = int(state["step"]), int(state["tokens"])
        self.elapsed_s = float(state["elapsed_s"])

    def save(self) -> None:
        """Writes the state; a kill in the middle leaves the previous one."""
        partial = self.state_path.with_suffix(".partial")
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "tokens": self.tokens,
            "elapsed_s": self.elapsed_s,
        }
        torch.save(state, partial)
        os.replace(partial, self.state_path)

    def log(self, **record: object) -> None:
        """Appends one line to the log."""
        with self.log_path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def train_step(self) -> float:
        """One optimiser step on the next batch; the loss before it, in nats."""
        recipe, step = self.recipe, self.step
        self.model.set_quantised(recipe.is_quantised(step))
        source = self.batches.packed if recipe.is_packed(step) else self.batches.single
        rows = source(step)
        loss = loss_of(self.model, rows)
        self.model.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip_norm)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr(step) * group["lr_factor"]
            optimizer.step()
        self.step += 1
        self.tokens += int((rows[:, 1:] != PAD).sum())
        return loss.item()

    def evaluate(self) -> None:
        """Logs the held-out loss with float and with 4-bit weights."""
        record: dict[str, float] = {}
        for name, is_quantised in (("float", False), ("int4", True)):
            self.model.set_quantised(is_quantised)
            loss = held_out_loss(self.model, self.held_out_rows[:40])
            record[f"held_out_loss_{name}"] = round(loss, 4)
        self.log(step=self.step, elapsed_s=round(self.elapsed_s, 1), **record)

    def run(self, *, max_s: float) -> None:
        """Trains until the recipe's end, `max_s` seconds or SIGTERM."""
        start_s = saved_s = previous_s = self.clock()
        losses: list[float] = []
        while self.step < self.recipe.total_steps and not self.is_stopping:
            losses.append(self.train_step())
            now_s = self.clock()
            self.elapsed_s += now_s - previous_s
            previous_s = now_s
            if self.step % 25 == 0:
                self._log_progress(losses)
                losses.clear()
            if self.step % 500 == 0:
                self.evaluate()
            if now_s - saved_s > 60:
                self.save()
                saved_s = now_s
            if now_s - start_s > max_s:
                break
        self.save()
        if not self.is_stopping:
            self.evaluate()

    def _log_progress(self, losses: list[float]) -> None:
        self.log(
            step=self.step,
            tokens=self.tokens,
            loss=round(sum(losses) / len(losses), 4),
            lr=round(self.recipe.lr(self.step), 6),
            elapsed_s=round(self.elapsed_s, 1),
            tokens_per_s=round(self.tokens / self.elapsed_s),
            is_quantised=self.recipe.is_quantised(self.step),
        )


def main() -> None:
    """Command line: train.py WORK_DIR [--total-steps N] [--max-s S]."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--total-steps", type=int, default=Recipe.total_steps)
    parser.add_argument("--max-s", type=float, default=math.inf)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recipe = Recipe(total_steps=arguments.total_steps)
    trainer = Trainer(arguments.work_dir, recipe, time.monotonic)

    def stop(*_: object) -> None:
        trainer.is_stopping = True

    signal.signal(signal.SIGTERM, stop)
    trainer.run(max_s=arguments.max_s)


if __name__ == "__main__":
    main()
