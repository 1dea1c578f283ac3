"""Divergences of models with some tensors in other types, against whole models' logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero import LLM
from hetero.compiling.divergence import UNSCORED, divergences, end_tensors, kl, matmul_tensors
from hetero.compiling.precision import Tensors
from hetero.generation.sampling import log_softmax
from hetero.models.gguf import GgufFile
from hetero.models.gguf.float_rows import GgufRows
from hetero.models.gguf.kinds import Kind
from hetero.models.gguf.requantising import fits, write_copy
from tests.models.gguf_files import convert, write_tiny
from tests.runtime.test_families import FILED, LARGER
from tests.support.checkpoints import Case, make_checkpoint

DENSE = [x for x in FILED if "experts" not in x and not x.endswith(("Moe", "GptOss"))]


def exact_kl(a: np.ndarray, b: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    p, q = log_softmax(a), log_softmax(b)
    return (np.exp(p) * (p - q)).sum(axis=-1)


def logits(path: Path, tokens: list[int]) -> np.ndarray:  # type: ignore[type-arg]
    with LLM(str(path), device="npu", weights="f32", kv="f32") as llm:
        return llm.logits(tokens)


@settings(deadline=None)
@given(seed=st.integers(0, 1000), spread=st.sampled_from([0.1, 3.0, 30.0, 300.0]))
def test_kl_is_that_of_float64(seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    a = (spread * rng.standard_normal((3, 50))).astype(np.float32)
    for b in (
        (spread * rng.standard_normal((3, 50))).astype(np.float32),
        a + rng.standard_normal((3, 50)).astype(np.float32) + np.float32(7),
    ):
        wanted = exact_kl(a.astype(np.float64), b.astype(np.float64))
        assert kl(a, b) == pytest.approx(wanted, rel=1e-4, abs=1e-6 * spread)
    assert not kl(a, a).any()


def test_small_divergences_are_precise() -> None:
    """Those of 16-bit weights are a millionth of a nat, which a difference of logarithms loses."""
    rng = np.random.default_rng(0)
    a = (4 * rng.standard_normal((4, 5000))).astype(np.float32)
    b = a + np.float32(1e-4) * rng.standard_normal(a.shape).astype(np.float32)
    wanted = exact_kl(a.astype(np.float64), b.astype(np.float64))
    assert 1e-10 < wanted.max() < 1e-7
    assert kl(a, b) == pytest.approx(wanted, rel=0.01)


def check_divergences(path: Path, tmp_path: Path, vocabulary: int) -> None:
    """A third of the tensors in other types, and all of them, side by side and as files."""
    weights = GgufRows(GgufFile(path))
    names = [x for x in matmul_tensors(weights) if fits(weights.file.tensors[x].shape, Kind.Q4_0)]
    assert len(names) > 4
    assert end_tensors(weights) <= set(matmul_tensors(weights))
    variants = [
        dict.fromkeys(names[1::3], Kind.Q5_0),
        {},
        dict(zip(names, [Kind.Q4_0, Kind.Q8_0, Kind.F16] * len(names), strict=False)),
    ]
    tokens = [np.random.default_rng(x).integers(3, vocabulary, 24 + x).tolist() for x in (0, 5)]
    lost = divergences(weights, tokens, variants)
    assert not lost[1].any()
    for i in (0, 2):
        write_copy(weights.file, tmp_path / f"{i}.gguf", variants[i])
        wanted = [
            exact_kl(logits(path, x), logits(tmp_path / f"{i}.gguf", x))[len(x) // UNSCORED :]
            for x in tokens
        ]
        assert lost[i] == pytest.approx(np.concatenate(wanted), rel=0.02, abs=1e-6)
        assert lost[i].mean() > 1e-5


@pytest.mark.full
def test_variants_run_side_by_side_as_they_do_alone(tmp_path: Path) -> None:
    head = np.random.default_rng(1).normal(0, 0.2, (268, 32)).astype(np.float32)
    for name, tensors in (("tied", {}), ("own", {"output.weight": head})):
        path = write_tiny(tmp_path / f"{name}.gguf", tensors=tensors)
        check_divergences(path, tmp_path, 260)


def test_inputs_in_int8_are_those_of_the_engine(tmp_path: Path) -> None:
    """Tensors of at most 6 bits round theirs, others of the same matmul do not."""
    source = GgufRows(GgufFile(write_tiny(tmp_path / "f.gguf")))
    kinds = dict.fromkeys(matmul_tensors(source), Kind.Q4_1)
    kinds |= {"blk.0.attn_k.weight": Kind.Q8_0, "blk.0.ffn_up.weight": Kind.F16}
    write_copy(source.file, tmp_path / "m.gguf", kinds)
    tensors = Tensors.of(GgufRows(GgufFile(tmp_path / "m.gguf")))
    rounded = tensors.int8_inputs({})
    assert "blk.0.attn_q.weight" in rounded
    assert rounded.isdisjoint({"blk.0.attn_k.weight", "blk.0.ffn_up.weight"})
    tokens = np.random.default_rng(4).integers(3, 260, 40).tolist()
    lost = divergences(tensors.weights, [tokens], [{}, {}], int8=[rounded, frozenset()])
    assert not lost[1].any()
    exact = logits(tmp_path / "m.gguf", tokens)
    with LLM(str(tmp_path / "m.gguf"), device="npu", weights="gguf-a8", kv="f32") as llm:
        wanted = exact_kl(exact, llm.logits(tokens))[len(tokens) // UNSCORED :]
    assert wanted.mean() > 1e-6
    assert np.abs(lost[0] - wanted).mean() < 0.05 * wanted.mean()


@pytest.mark.full
@pytest.mark.parametrize("family", DENSE)
def test_families_have_the_divergences_of_their_logits(family: str, tmp_path: Path) -> None:
    kind = family.partition(" ")[0]
    make_checkpoint(Case(family, kind, LARGER | FILED[family]), tmp_path)
    convert(tmp_path, tmp_path / "model.gguf")
    check_divergences(tmp_path / "model.gguf", tmp_path, 263)


def test_progress_ends_at_all(tmp_path: Path) -> None:
    weights = GgufRows(GgufFile(write_tiny(tmp_path / "m.gguf")))
    seen: list[tuple[int, int]] = []
    variants = [{x: Kind.Q4_0} for x in matmul_tensors(weights)]
    divergences(
        weights, [[5, 6, 7, 8]], variants, progress=lambda done, total: seen.append((done, total))
    )
    assert seen == sorted(seen)
    assert seen[-1] == (100, 100)
