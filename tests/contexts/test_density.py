"""Information density against equation (1), written out in float64, on every kind of plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero import LLM
from hetero.backends.ops import Attention
from hetero.contexts.chunks import Chunk
from hetero.runtime import attention_scores as attention_tap
from hetero.runtime.kv.attention_stats import ScoreStats, sampled, sum_scores
from tests.contexts.models import WAYS, open_llm
from tests.runtime.models import tiny_model


def probabilities(op: Attention, queries: Any, keys: Any, positions: list[int]) -> Any:
    """A [H, rows, columns] in float64, one row after another."""
    found = np.zeros((op.heads, len(positions), keys.shape[1]))
    for head in range(op.heads):
        own = keys[head // (op.heads // op.kv_heads)].astype(np.float64)
        for row, at in enumerate(positions):
            first = max(0, at - op.window + 1) if op.window else 0
            scores = own[first : at + 1] @ queries[row, head].astype(np.float64)
            scores *= op.softmax_scale
            if op.softcap:
                scores = op.softcap * np.tanh(scores / op.softcap)
            weights = np.exp(scores - scores.max())
            found[head, row, first : at + 1] = weights / weights.sum()
    return found


@given(
    seed=st.integers(0, 999),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3), (8, 1)]),
    window=st.sampled_from([0, 5]),
    softcap=st.sampled_from([0.0, 2.0]),
    rows=st.integers(0, 20),
)
def test_score_sums_of_columns(
    seed: int, heads: tuple[int, int], window: int, softcap: float, rows: int
) -> None:
    random = np.random.default_rng(seed)
    op = Attention(
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=8,
        capacity=64,
        window=window,
        softcap=softcap,
    )
    positions = sorted(random.choice(40, rows, replace=False).tolist())
    queries = random.standard_normal((rows, heads[0], 8)).astype(np.float32)
    keys = random.standard_normal((heads[1], 40, 8)).astype(np.float32)
    wanted = probabilities(op, queries, keys, positions).sum(axis=1).mean(axis=0)
    found = sum_scores(op, queries, keys, positions)
    assert np.allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert found.sum() == pytest.approx(rows, rel=1e-5), "each row gives one"


def test_the_papers_example() -> None:
    """Figure 6: column a gets 0.3, 0.5 and 0.1 of the three rows that see it."""
    score_sums, chunk = ScoreStats(8), Chunk("", b"", 0, (7,), 8)
    for position, share in enumerate((0.3, 0.5, 0.1)):
        score_sums.add(np.array([share]), [position])
    score_sums.give([chunk])
    assert chunk.density == pytest.approx(0.3)
    assert chunk.seen == 3
    score_sums.reset()
    score_sums.add(np.array([0.7]), [3])
    score_sums.give([chunk])
    assert chunk.density == pytest.approx((0.3 + 0.5 + 0.1 + 0.7) / 4), "over all rows so far"


@given(first=st.integers(0, 99), count=st.integers(0, 99), every=st.sampled_from([1, 2, 16]))
def test_sampled_rows(first: int, count: int, every: int) -> None:
    wanted = [t for t in range(count) if (first + t) % every == every - 1]
    assert sampled(first, count, every) == wanted


@pytest.mark.full
@pytest.mark.parametrize("way", [*WAYS])
def test_taps_tell_what_the_devices_computed_on(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of a prompt and of decoding steps; the answer is the one without sums_scores."""
    if "opencl" in WAYS[way].values():
        pytest.importorskip("pyopencl")
    prompt = np.random.default_rng(2).integers(0, 263, 70).tolist()
    sums, seen = np.zeros(120), []
    run = attention_tap._TapCall.run

    def spied(self: Any) -> None:
        first = int(self._position.array[0])
        rows, op = sampled(first, self.m, self.every), self._op
        seen.append((first, self.m))
        queries = self._qkv.array[rows, : op.heads * op.head_dim].reshape(len(rows), op.heads, -1)
        positions = [first + row for row in rows]
        keys = self._keys.array[:, : positions[-1] + 1].copy()
        part = probabilities(op, queries, keys, positions).sum(axis=1).mean(axis=0)
        sums[: len(part)] += part / 3
        run(self)

    monkeypatch.setattr(attention_tap._TapCall, "run", spied)
    with open_llm(tiny_model(tmp_path), way) as llm:
        plain = llm.generate(prompt, context=llm.new_context(), max_tokens=30)
        assert not seen
        added, other = ScoreStats(120), llm.new_context()
        other.score_stats = added
        assert llm.generate(prompt, context=other, max_tokens=30).tokens == plain.tokens
        able = way not in ("npu", "tensor level, rest on the npu")  # a device with the operation
        assert bool(seen) != able, "whose host call did not run"
        sums[:], seen[:] = 0, []
        monkeypatch.setattr(attention_tap.RowScores, "kernel", lambda *_: None)
        llm.engine.deployment.lower()
        context = llm.new_context()
        context.score_stats = ScoreStats(120)
        tapped = llm.generate(prompt, context=context, max_tokens=30)
        assert tapped.tokens == plain.tokens
        assert seen, "sums_scores ran"
        assert np.allclose(added.sums, sums, rtol=1e-4, atol=1e-6)
        assert np.array_equal(added.rows, context.score_stats.rows)
        assert np.allclose(context.score_stats.sums, sums, rtol=1e-4, atol=1e-6)
        assert [int(context.score_stats.rows[at]) for at in (15, 16, 69, 70, 95, 96)] == [
            16,  # of the prompt 15, 19, … 67; of the answer 79 and 95
            15,
            2,
            2,
            1,
            0,
        ]
        assert set(tapped.stats.placement) == set(plain.stats.placement)


@pytest.mark.full
def test_sampled_rows_rank_chunks_as_all_rows_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo model on stories: Spearman's correlation with equation (1) over every row."""
    records: list[Any] = []
    run = attention_tap._TapCall.run

    def spied(self: Any) -> None:
        first, op = int(self._position.array[0]), self._op
        queries = self._qkv.array[: self.m, : op.heads * op.head_dim].copy()
        records.append((op, queries.reshape(self.m, op.heads, -1), first, self._keys))
        run(self)

    with LLM("demo", device="npu") as llm:
        text: list[int] = []
        for seed in range(8):
            begin = ["Once upon a time", "The little dog", "In the forest"][seed % 3]
            text += llm.encode(begin)
            text += llm.generate(begin, max_tokens=150, temperature=1.0, seed=seed).tokens
        text = text[:400]
        monkeypatch.setattr(attention_tap._TapCall, "run", spied)
        context = llm.new_context()
        context.score_stats = ScoreStats(llm.max_seq_len)
        llm.generate(text, context=context, max_tokens=1)
        score_sums = np.zeros(400)
        for op, queries, first, keys in records:
            positions = list(range(first, first + len(queries)))
            known = keys.array[:, : positions[-1] + 1]
            part = probabilities(op, queries, known, positions).sum(axis=1).mean(axis=0)
            score_sums[: len(part)] += part / 4
        full = score_sums / np.arange(400, 0, -1)
        chunks = [Chunk("", b"", at, tuple(text[at : at + 16]), 8) for at in range(0, 400, 16)]
        context.score_stats.give(chunks)
        wanted = [full[chunk.start : chunk.stop].mean() for chunk in chunks]
    from scipy.stats import spearmanr  # heavy, and tests are collected without some packages

    assert spearmanr(wanted, [chunk.density for chunk in chunks]).statistic >= 0.94
