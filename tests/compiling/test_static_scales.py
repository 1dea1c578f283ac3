"""w8a8: scales of least error, hot channels, and directories that keep and verify them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero import LLM
from hetero.backends.formats import WeightFormat
from hetero.backends.ops import MatMul
from hetero.backends.reference.compute import program
from hetero.compiling.calibration import calibrated
from hetero.compiling.sketch import Sketch
from hetero.compiling.static_scales import (
    MAX_HOT,
    InputStatistics,
    StaticWeights,
    Trial,
    choose_scales,
    pack_without,
    static_weights,
    step_of,
)
from hetero.errors import ModelError, UserError
from hetero.models import open_model
from hetero.models.calibration_record import OutlierChoice, matmul_shapes
from hetero.models.packed_file import PAD_PREFIX
from hetero.models.quantized import save
from hetero.models.random_models import RandomWeights
from tests.models.model_helpers import small_config

TEXT = "Once upon a time, there was a small fox who liked to play in the old forest. " * 12
TOKENS = np.random.default_rng(5).integers(0, 301, (3, 50)).tolist()


def outlying(rng: np.random.Generator, m: int, k: int, hot: list[int]) -> np.ndarray:  # type: ignore[type-arg]
    """Normal activations [m, k] of which some channels are far larger."""
    x = rng.standard_normal((m, k)).astype(np.float32)
    x[:, hot] *= 60
    return x


@settings(deadline=None)
@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=300),
    percent=st.sampled_from([1.0, 50.0, 99.0, 99.9, 100.0]),
    pieces=st.integers(1, 5),
)
def test_a_sketch_knows_the_quantile_nearly(
    values: list[float], percent: float, pieces: int
) -> None:
    x = np.array(values, dtype=np.float32)
    found = Sketch.of(*np.array_split(x[::-1], pieces)).percentile(percent)
    assert found == Sketch.of(x).percentile(percent)
    exact = np.sort(np.abs(x))[max(1, int(np.ceil(percent / 100 * len(x)))) - 1]
    if exact >= np.finfo(np.float32).tiny:
        assert exact <= found <= exact * (1 + 2**-8)
    left = Sketch.of(x, x).without(Sketch.of(x))
    assert np.array_equal(left.counts, Sketch.of(x).counts)


def test_a_sketch_refuses_what_is_not_finite_and_is_empty_at_first() -> None:
    with pytest.raises(ValueError, match="finite"):
        Sketch.of(np.array([1.0, np.nan]))
    assert Sketch().percentile(99) == 0


def test_the_error_is_that_of_the_reference() -> None:
    rng = np.random.default_rng(1)
    weight, x = rng.standard_normal((37, 70), dtype=np.float32), outlying(rng, 50, 70, [3])
    step = step_of(4.0)
    op = MatMul(n=37, k=70, weight_format=WeightFormat.W8A8)
    y = np.full((50, 37), np.nan, dtype=np.float32)
    weights = {"weight": pack_without(weight, np.zeros(0, np.int32)), "x_scale": np.float32([step])}
    program(op, weights)[0]({"x": x, "y": y})
    exact = x.astype(np.float64) @ weight.T
    wanted = np.square(y - exact).sum() / np.square(exact).sum()
    assert Trial(weight, [x]).error(step) == pytest.approx(wanted, rel=1e-3)


def test_channels_that_hold_the_outliers_are_found_and_leave_the_integers() -> None:
    rng = np.random.default_rng(2)
    hot = [5, 130, 199]
    weight, x = rng.standard_normal((64, 200), dtype=np.float32), outlying(rng, 300, 200, hot)
    found = choose_scales(weight, [x[:100], x[100:]])
    assert set(hot) <= set(found.shadowed.hot.tolist())
    assert len(found.shadowed.hot) <= MAX_HOT * 200
    cold = np.abs(np.delete(x, found.shadowed.hot, axis=1)).max()
    assert found.shadowed.step * 127 <= cold * 1.01
    assert found.shadowed.error < found.pruned.error / 20 <= found.widest.error / 20
    assert found.importance == np.abs(x).max() / found.shadowed.step > 20 * 127
    assert found.outliers[hot].sum() > 0.8 * found.outliers.sum()
    packed = pack_without(weight, found.shadowed.hot)
    assert not packed.codes()[:, hot].any()


@pytest.mark.parametrize("paper", [False, True])
def test_every_choice_is_the_least_of_all(paper: bool) -> None:
    rng = np.random.default_rng(3)
    k = 2000 if paper else 100
    weight, x = rng.standard_normal((20, k), dtype=np.float32), outlying(rng, 200, k, [7])
    found, trial = choose_scales(weight, [x], paper=paper), Trial(weight, [x])
    flat = [trial.error(step) for _, step in InputStatistics([x]).steps(np.zeros(0, np.int32))]
    assert found.widest.step == step_of(float(np.abs(x).max()))
    assert found.pruned.error == (found.widest.error if paper else min(flat))
    # Nothing is cut off: only rounding is left.
    assert found.shadowed.error < trial.error(found.shadowed.step) / 10
    if paper:
        assert not len(found.shadowed.hot)
    else:
        assert 1 <= len(found.shadowed.hot) <= max(1, MAX_HOT * k)


@pytest.mark.parametrize("excess", [False, True])
def test_a_shadow_adds_an_outlier_that_the_text_did_not_have(excess: bool) -> None:
    rng = np.random.default_rng(4)
    weight, x = rng.standard_normal((20, 100), dtype=np.float32), outlying(rng, 200, 100, [7])
    found = choose_scales(weight, [x], excess=excess).shadowed
    unseen = outlying(rng, 50, 100, [7, 60])
    error = Trial(weight, [unseen]).error(found.step, found.hot, excess=found.excess)
    assert (error < 1e-3) == excess


def test_inputs_of_zeros_have_a_scale() -> None:
    x, weight = np.zeros((40, 64), np.float32), np.ones((3, 64), np.float32)
    for paper in (False, True):
        found = choose_scales(weight, [x], paper=paper)
        assert (found.shadowed.step, found.pruned.step) == (1.0, 1.0)
        assert found.shadowed.error == 0


def static(outliers: str, **changes: Any) -> StaticWeights:
    exact = RandomWeights(small_config(**changes), WeightFormat.F32)
    return static_weights(exact, TOKENS, outliers=outliers, text=TEXT)


@pytest.mark.parametrize(
    ("outliers", "kept"), [("none", 0), ("all", 12), ("15%", 2), ("paper", 2), ("1%", 1)]
)
def test_the_most_important_matmuls_keep_a_shadow(outliers: str, kept: int) -> None:
    weights = static(outliers)
    found = weights.calibration
    assert found is not None
    left = [x for x in found.matmuls.values() if not x.pruned]
    assert len(left) == kept
    least = min((x.importance for x in left), default=np.inf)
    pruned = {name: x for name, x in found.matmuls.items() if x.pruned}
    assert pruned.pop("lm_head")
    assert all(x.importance <= least for x in pruned.values())
    assert list(found.matmuls) == list(matmul_shapes(weights.config))
    assert found.tokens == 150


def test_the_head_keeps_its_columns() -> None:
    assert static("all").calibration.matmuls["lm_head"].pruned  # type: ignore[union-attr]
    weights = static("all", tie_word_embeddings=True)
    assert weights.calibration is not None
    assert weights.calibration.matmuls["lm_head"].pruned
    assert weights.lm_head() is weights.embed()


def test_shadows_are_refused_where_a_norm_is_behind_the_matmul() -> None:
    changes = {"architecture": "gemma2", "out_norms": True, "windows": (0, 0, 0)}
    with pytest.raises(UserError, match=r"gemma2 norms what a matmul gives .* --outliers none"):
        static("15%", **changes)
    found = static("none", **changes).calibration
    assert found is not None
    assert found.shadowed == []


@pytest.mark.parametrize("outliers", ["none", "50%", "all", "paper"])
def test_a_directory_holds_the_same(tmp_path: Path, outliers: str) -> None:
    wanted = static(outliers)
    save(wanted, tmp_path / "out")
    found = open_model(tmp_path / "out", verify=True).weights
    assert found.weight_format == "w8a8"
    assert found.calibration == wanted.calibration
    assert found.nbytes == wanted.nbytes
    for index in range(3):
        ours, theirs = found.block(index), wanted.block(index)
        for role in ("qkv", "o", "gate_up", "down"):
            name = f"blocks.{index}.{role}"
            assert np.array_equal(ours.matrix(role).data, theirs.matrix(role).data)
            assert ours.vectors[f"{role}_x_scale"] == theirs.vectors[f"{role}_x_scale"]
            assert ours.shadows.keys() == theirs.shadows.keys()
            if role not in ours.shadows:
                assert wanted.calibration is not None
                assert wanted.calibration.hot(name) == 0
                continue
            shadow = ours.shadows[role]
            assert np.array_equal(shadow.channels, theirs.shadows[role].channels)
            assert np.array_equal(shadow.weight, theirs.shadows[role].weight)
            columns = ours.matrix(role).codes()[:, shadow.channels]
            assert columns.any() == (outliers == "paper")  # there the integers keep them
    again = save(found, tmp_path / "again", name="out")
    first, second = (x / "weights.safetensors" for x in (tmp_path / "out", again))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.full
def test_the_command_and_what_it_writes_generates(
    tmp_path: Path, command: Callable[..., Any]
) -> None:
    text, out = tmp_path / "text", str(tmp_path / "out")
    text.write_text(TEXT)
    common = ("quantize", "demo", "--weights", "w8a8", "--calibrate", str(text), "--out", out)
    done = command(*common, "--outliers", "none", "--calibration-tokens", "96")
    assert done.returncode == 0, done.stderr
    assert "0 of 17 matmuls keep a shadow" in done.stdout
    manifest = json.loads((tmp_path / "out" / "hetero.json").read_text())
    assert (manifest["schema_version"], manifest["calibration"]["tokens"]) == (2, 96)  # no shadows
    with LLM(out, device="gpu", gpu="reference") as llm, LLM("demo", device="npu") as exact:
        said = llm.generate("Once upon a time", max_tokens=3, temperature=0).tokens
        assert said == exact.generate("Once upon a time", max_tokens=3, temperature=0).tokens
    done = command(*common, "--overwrite", "--calibration-tokens", "96")
    assert "3 of 17 matmuls keep a shadow" in done.stdout
    with LLM(out, device="gpu", gpu="reference") as llm:
        assert llm.generate("Once upon a time", max_tokens=3, temperature=0).tokens == said


def test_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Once")
    with pytest.raises(UserError, match="calibration needs at least 32"):
        calibrated("demo", "w8a8", tmp_path / "text", 100)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("15%", (0.15, False)), ("0%", (0, False)), ("100%", (1, False)), ("paper", (0.15, True))],
)
def test_choices(text: str, wanted: tuple[float, bool]) -> None:
    assert OutlierChoice.parse(text) == wanted


# Damage that is found at opening.


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with shadows."""
    return save(static("all"), tmp_path / "saved")


def edited(path: Path, name: str, **changes: Any) -> None:
    manifest = json.loads((path / "hetero.json").read_text())
    manifest["calibration"]["matmuls"][name] |= changes
    (path / "hetero.json").write_text(json.dumps(manifest))


def without(path: Path) -> None:
    manifest = json.loads((path / "hetero.json").read_text())
    del manifest["calibration"]["matmuls"]["lm_head"]
    (path / "hetero.json").write_text(json.dumps(manifest))


def renamed(path: Path) -> None:
    text = (path / "hetero.json").read_text()
    (path / "hetero.json").write_text(text.replace("blocks.2.down", "blocks.3.down"))


NAME = "blocks.1.down"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "more hot channels": (lambda p: edited(p, NAME, hot=9), "blocks.1.down_hot"),
    "no hot channels": (lambda p: edited(p, NAME, hot=0), "blocks.1.down_hot"),
    "too many": (lambda p: edited(p, NAME, hot=99), "hot must be at most 43, got 99"),
    "negative": (lambda p: edited(p, NAME, hot=-1), "greater than or equal to 0"),
    "pruned and hot": (lambda p: edited(p, NAME, pruned=True), "a pruned matmul has no hot"),
    "another scale": (lambda p: edited(p, NAME, x_scale=0.5), "down_x_scale must be the 0.5 of"),
    "no scale": (lambda p: edited(p, NAME, x_scale=0.0), "greater than 0"),
    "percentile": (lambda p: edited(p, NAME, percentile=101.0), "less than or equal to 100"),
    "error": (lambda p: edited(p, NAME, error="NaN"), "error: Input should be a finite number"),
    "field": (lambda p: edited(p, NAME, cold=1), "cold: Extra inputs are not permitted"),
    "missing": (without, "calibration.matmuls: lm_head is missing"),
    "unknown": (renamed, "calibration.matmuls: blocks.2.down is missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_record_is_refused(saved: Path, kind: str) -> None:
    change, sentence = DAMAGE[kind]
    change(saved)
    with pytest.raises(ModelError) as caught:
        open_model(saved)
    assert sentence in str(caught.value)
    assert "run hetero quantize again" in str(caught.value)


def tensor(path: Path, name: str, values: Any) -> None:
    """Other bytes in a tensor, whose hash is checked with --verify only."""
    weights: Any = open_model(path).weights
    entry = weights.file.entries[name]
    file = path / "weights.safetensors"
    data = bytearray(file.read_bytes())
    raw = np.asarray(values).tobytes()
    data[entry.start : entry.start + len(raw)] = raw
    file.write_bytes(data)
    assert not name.startswith(PAD_PREFIX)


@pytest.mark.parametrize(
    ("name", "values", "sentence"),
    [
        ("down_hot", np.int32([43]), "must hold rising channels of 43"),
        ("down_hot", np.int32([-1]), "must hold rising channels of 43"),
        ("down_hot_weight", np.float16([np.nan]), "holds a value that is not finite"),
    ],
)
def test_damaged_hot_channels_are_refused(
    saved: Path, name: str, values: Any, sentence: str
) -> None:
    tensor(saved, f"blocks.1.{name}", values)
    with pytest.raises(ModelError, match=sentence):
        open_model(saved).weights.block(1)
    with pytest.raises(ModelError, match="does not have the SHA-256"):
        open_model(saved, verify=True)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_scales_without_a_calibration_are_checked_too(tmp_path: Path, scale: float) -> None:
    path = save(RandomWeights(small_config(), WeightFormat.W8A8), tmp_path / "random")
    tensor(path, "lm_head_x_scale", np.float32([scale]))
    with pytest.raises(ModelError, match="lm_head_x_scale must be a positive number"):
        open_model(path)
