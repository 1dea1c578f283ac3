"""Quantised directories: what is written reads back, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from hetero.backends.formats import WeightFormat
from hetero.backends.weights import PackedWeight
from hetero.errors import ModelError
from hetero.models import ModelConfig, ModelWeights, open_model, quantized
from hetero.models.packed_file import PAD_PREFIX, QuantizedWeights
from hetero.models.random_models import RandomWeights
from tests.models.model_helpers import UNCALIBRATED, byte_level_tokenizer, small_config
from tests.support.selection import examples


def same(a: Any, b: Any) -> bool:
    """Whether two values of a block are bit by bit the same."""
    if isinstance(a, PackedWeight):
        parts = [(a.data, b.data), (a.scales, b.scales)]
        return (a.storage, a.n, a.k) == (b.storage, b.n, b.k) and all(same(*x) for x in parts)
    return a is b is None or np.array_equal(a, b)


def check_same(found: ModelWeights, expected: ModelWeights) -> None:
    assert found.config == expected.config
    assert found.nbytes == expected.nbytes
    for index in range(expected.config.num_layers):
        ours, theirs = found.block(index), expected.block(index)
        for mine, wanted in ((ours.matrices, theirs.matrices), (ours.vectors, theirs.vectors)):
            assert mine.keys() == wanted.keys()
            assert all(same(mine[name], wanted[name]) for name in wanted)
    assert same(found.embed(), expected.embed())
    assert same(found.lm_head(), expected.lm_head())
    assert same(found.final_norm(), expected.final_norm())
    assert (found.lm_head() is found.embed()) == expected.config.tie_word_embeddings


@pytest.fixture
def model(make_checkpoint: Callable[..., Path]) -> Path:
    """A checkpoint with a tokenizer and a chat template."""
    path = make_checkpoint(small_config(eos_ids=(1,)), tokenizer=byte_level_tokenizer())
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    (path / "notes.txt").write_text("not ours")
    return path


@pytest.fixture
def saved(model: Path, tmp_path: Path) -> Path:
    """The checkpoint, quantised."""
    return quantized.save(open_model(model).weights, tmp_path / "saved")


@pytest.mark.parametrize("weights", UNCALIBRATED)
def test_a_checkpoint_reads_back_the_same(model: Path, tmp_path: Path, weights: str) -> None:
    original = open_model(model, weights=weights)
    quantized.save(original.weights, tmp_path / "saved")
    found = open_model(tmp_path / "saved", weights=weights, verify=True)
    assert isinstance(found.weights, QuantizedWeights)
    check_same(found.weights, original.weights)
    assert found.name == original.name == "model"
    assert found.tokenizer.encode("Once upon") == original.tokenizer.encode("Once upon")
    assert found.tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi!"
    assert found.eos_ids == (1,)


STORED = [x for x in WeightFormat if not x.of_file]


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Small models of odd sizes, with everything that a block may or may not have."""
    qk_norm, attention_bias = draw(st.booleans()), draw(st.booleans())
    heads, kv_heads = draw(st.sampled_from([(1, 1), (4, 2), (6, 1)]))
    return small_config(
        architecture="qwen3" if qk_norm else "llama",
        hidden_size=draw(st.integers(1, 70)),
        intermediate_size=draw(st.integers(1, 70)),
        vocab_size=draw(st.integers(1, 70)),
        num_layers=draw(st.integers(1, 3)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 6, 32])),
        qk_norm=qk_norm,
        tie_word_embeddings=draw(st.booleans()),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=draw(st.booleans()) and not qk_norm,
    )


@pytest.mark.full
@settings(deadline=None, max_examples=examples(40))
@given(config=configs(), weights=st.sampled_from(STORED), seed=st.integers(0, 2**32))
def test_any_model_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, config: ModelConfig, weights: WeightFormat, seed: int
) -> None:
    original = RandomWeights(config, weights, seed)
    out = tmp_path_factory.mktemp("any") / "saved"
    quantized.save(original, out)
    check_same(open_model(out, weights=weights, verify=True).weights, original)


def test_tensors_are_whole_pages_of_the_file(saved: Path) -> None:
    weights = open_model(saved).weights
    assert isinstance(weights, QuantizedWeights)
    entries = weights.file.entries
    starts = [x.start for name, x in entries.items() if not name.startswith(PAD_PREFIX)]
    assert all(start % 4096 == 0 for start in starts)
    assert weights.file.nbytes % 4096 == 0
    block = weights.block(1)
    assert block.matrix("qkv").data.ctypes.data % 4096 == 0
    assert not block.matrix("qkv").data.flags.writeable


def test_the_safetensors_library_reads_the_file(saved: Path) -> None:
    weights = open_model(saved).weights
    with safe_open(saved / "weights.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "hetero-q4", "schema_version": "1"}
        found = file.get_tensor("blocks.2.gate_up.data")
    assert np.array_equal(found, weights.block(2).matrix("gate_up").data)


def test_only_what_belongs_to_the_model_is_copied(saved: Path) -> None:
    assert sorted(x.name for x in saved.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "hetero.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "weights.safetensors",
    ]


def test_the_same_model_gives_the_same_bytes(model: Path, saved: Path, tmp_path: Path) -> None:
    again = quantized.save(open_model(model).weights, tmp_path / "again")
    assert all((again / x.name).read_bytes() == x.read_bytes() for x in saved.iterdir())
    assert open_model(again).fingerprint == open_model(saved).fingerprint


def test_a_quantised_model_can_be_saved_again(saved: Path, tmp_path: Path) -> None:
    again = quantized.save(open_model(saved).weights, tmp_path / "again", name="model")
    assert (again / "weights.safetensors").read_bytes() == (
        saved / "weights.safetensors"
    ).read_bytes()


def test_a_random_model_keeps_its_byte_tokenizer(tmp_path: Path) -> None:
    weights = RandomWeights(small_config(), WeightFormat.W4A16)
    first = quantized.save(weights, tmp_path / "first", name="random:small")
    second = quantized.save(open_model(first).weights, tmp_path / "second")
    for path in (first, second):
        assert open_model(path).tokenizer.encode("hé") == list("hé".encode())
    assert open_model(first).name == "random:small"


def test_releasing_a_mapped_block_keeps_its_values(saved: Path) -> None:
    weights = open_model(saved).weights
    block = weights.block(0)
    before = block.matrix("down").dequantize()
    weights.release(0)
    weights.release_embeddings()
    np.testing.assert_array_equal(block.matrix("down").dequantize(), before)
    np.testing.assert_array_equal(weights.block(0).matrix("down").dequantize(), before)


def test_progress_counts_to_the_end(model: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    out = quantized.save(
        open_model(model).weights, tmp_path / "out", progress=lambda *x: calls.append(x)
    )
    size = (out / "weights.safetensors").stat().st_size
    assert calls == sorted(calls)
    assert calls[-1] == (size, size)
    assert len(calls) == 3 + 3  # blocks; embeddings, head, norm


@pytest.mark.parametrize("weights", ["w4a16", "w4a8"])
def test_formats_of_one_storage_are_served(saved: Path, weights: str) -> None:
    assert open_model(saved, weights=weights).weights.weight_format == weights


@pytest.mark.parametrize("weights", ["w8a16", "f16", "f32"])
def test_formats_of_another_storage_are_refused(saved: Path, weights: str) -> None:
    with pytest.raises(ModelError) as caught:
        open_model(saved, weights=weights)
    assert str(caught.value) == (
        f"{saved}: holds q4 weights, which serve w4a16 and w4a8, not {weights}; use --weights "
        f"w4a16, or run hetero quantize on the original model with --weights {weights}"
    )


# Destinations, and failures half-way.


def listing(path: Path) -> dict[str, bytes]:
    return {str(x.relative_to(path)): x.read_bytes() for x in path.rglob("*") if x.is_file()}


def test_an_empty_directory_is_filled(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    quantized.save(open_model(model).weights, tmp_path / "out")
    assert open_model(tmp_path / "out", verify=True).name == "model"


def test_a_previous_output_is_replaced_only_when_asked(model: Path, saved: Path) -> None:
    before = listing(saved)
    other = open_model(model, weights="w8a16").weights
    with pytest.raises(ModelError) as caught:
        quantized.save(other, saved)
    assert str(caught.value) == (
        f"{saved}: already holds a quantised model; choose a new directory, or use --overwrite"
    )
    assert listing(saved) == before
    quantized.save(other, saved, overwrite=True)
    assert open_model(saved, weights="w8a16", verify=True).weights.weight_format == "w8a16"
    assert sorted(x.name for x in saved.parent.iterdir()) == ["model", "saved"]


def test_a_model_can_replace_itself(saved: Path) -> None:
    before = listing(saved)
    quantized.save(open_model(saved).weights, saved, overwrite=True, name="model")
    after = listing(saved)
    assert after.keys() == before.keys()
    assert after["weights.safetensors"] == before["weights.safetensors"]


def destination(tmp_path: Path, saved: Path, kind: str) -> tuple[Path, str]:
    """A destination that is refused, and the sentence."""
    if kind == "foreign directory":
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.txt").write_text("years")
        return tmp_path / "mine", (
            "holds files that hetero quantize did not write; choose a new directory"
        )
    if kind == "foreign file":
        (saved / "thesis.txt").write_text("years")
        return saved, (
            "holds thesis.txt, which hetero quantize did not write; choose a new directory, or "
            "move the file away"
        )
    if kind == "file":
        (tmp_path / "file").write_text("")
        return tmp_path / "file", "is a file; choose a directory"
    return tmp_path / "no" / "where", "there is no such directory; create it first"


@pytest.mark.parametrize("kind", ["foreign directory", "foreign file", "file", "nowhere"])
def test_destinations_that_are_refused(model: Path, saved: Path, tmp_path: Path, kind: str) -> None:
    out, sentence = destination(tmp_path, saved, kind)
    before = listing(tmp_path)
    with pytest.raises(ModelError) as caught:
        quantized.save(open_model(model).weights, out, overwrite=True)
    named = out.parent if kind == "nowhere" else out
    assert str(caught.value) == f"{named}: {sentence}"
    assert listing(tmp_path) == before


def test_a_full_disk_is_seen_before_writing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ModelError, match=r"out: needs \d+ bytes, but only 1000 are free; choose"):
        quantized.save(open_model(model).weights, tmp_path / "out")
    assert [x.name for x in tmp_path.iterdir()] == ["model"]


class _InterruptedError(BaseException):
    """Stands for Ctrl-C."""


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), _InterruptedError()])
@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_half_way_leaves_everything_as_it_was(
    model: Path, saved: Path, tmp_path: Path, error: BaseException, existing: bool
) -> None:
    def fail(done: int, total: int) -> None:
        if done > total // 2:
            raise error

    before = listing(tmp_path)
    out = saved if existing else tmp_path / "out"
    with pytest.raises((ModelError, _InterruptedError)) as caught:
        quantized.save(open_model(model).weights, out, progress=fail, overwrite=True)
    if isinstance(error, OSError):
        assert str(caught.value) == (
            f"{out}: cannot be written (No space left on device); choose another directory, or "
            "make room"
        )
    assert listing(tmp_path) == before
    assert sorted(x.name for x in tmp_path.iterdir()) == ["model", "saved"]


def test_a_failed_rename_brings_the_previous_output_back(
    model: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rename = listing(tmp_path), Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.suffix == ".partial":
            raise OSError(13, "Permission denied")
        return rename(path, target)

    weights = open_model(model).weights
    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(ModelError, match=r"cannot be written \(Permission denied\)"):
        quantized.save(weights, saved, overwrite=True)
    assert listing(tmp_path) == before


def test_a_spoilt_source_creates_nothing(model: Path, tmp_path: Path) -> None:
    file = model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-4:] = np.array([np.nan], dtype=np.float32).tobytes()
    file.write_bytes(content)
    with pytest.raises(ModelError, match="holds a value that is not finite"):
        quantized.save(open_model(model).weights, tmp_path / "out")
    assert [x.name for x in tmp_path.iterdir()] == ["model"]


# Damage that is found at opening.


def change_manifest(path: Path, **changes: Any) -> None:
    raw = json.loads((path / "hetero.json").read_text())
    (path / "hetero.json").write_text(json.dumps(raw | changes))


AGAIN = "run hetero quantize again"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (
        lambda path: os.truncate(path / "weights.safetensors", 4096),
        "weights.safetensors: must have {size} bytes by hetero.json, got 4096; " + AGAIN,
    ),
    "missing": (
        lambda path: (path / "tokenizer.json").unlink(),
        "tokenizer.json: is missing, but hetero.json names it; " + AGAIN,
    ),
    "edited": (
        lambda path: (path / "config.json").write_text(
            (path / "config.json").read_text().replace("301", "302")
        ),
        "config.json: does not have the SHA-256 that hetero.json names; " + AGAIN,
    ),
    "newer": (
        lambda path: change_manifest(path, schema_version=5),
        f"hetero.json: schema_version must be 1, 2, 3 or 4, got 5; upgrade hetero, or {AGAIN}",
    ),
    "other kind": (
        lambda path: change_manifest(path, kind="plan"),
        f"hetero.json: kind must be 'hetero-quantized', got 'plan'; {AGAIN}",
    ),
    "wrong field": (
        lambda path: change_manifest(path, header_sha256="x"),
        f"hetero.json: header_sha256: String should match pattern '^[0-9a-f]{{64}}$'; {AGAIN}",
    ),
    "outside": (
        lambda path: change_manifest(
            path,
            files=json.loads((path / "hetero.json").read_text())["files"]
            | {"../model/config.json": {"size_bytes": 1, "sha256": "0" * 64}},
        ),
        f"../model/config.json: is missing, but hetero.json names it; {AGAIN}",
    ),
    "no weights": (
        lambda path: change_manifest(path, files={}),
        f"hetero.json: files must list weights.safetensors and config.json; {AGAIN}",
    ),
    "header": (
        lambda path: change_manifest(path, header_sha256="0" * 64),
        f"weights.safetensors: header does not have the SHA-256 that hetero.json names; {AGAIN}",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_at_opening(saved: Path, damage: str) -> None:
    size = (saved / "weights.safetensors").stat().st_size
    change, sentence = DAMAGE[damage]
    change(saved)
    with pytest.raises(ModelError) as caught:
        open_model(saved)
    assert str(caught.value) == f"{saved}/{sentence.replace('{size}', str(size))}"


def test_a_flipped_bit_is_found_by_verification(saved: Path) -> None:
    file = saved / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-5000] ^= 1
    file.write_bytes(content)
    open_model(saved)
    with pytest.raises(ModelError) as caught:
        open_model(saved, verify=True)
    assert str(caught.value) == (
        f"{file}: does not have the SHA-256 that hetero.json names; {AGAIN}"
    )


def test_weights_of_another_model_are_refused(saved: Path, tmp_path: Path) -> None:
    config = json.dumps(small_config(num_layers=2).to_dict())
    (saved / "config.json").write_text(config)
    manifest = json.loads((saved / "hetero.json").read_text())
    manifest["files"]["config.json"] = {
        "size_bytes": len(config),
        "sha256": hashlib.sha256(config.encode()).hexdigest(),
    }
    change_manifest(saved, files=manifest["files"])
    with pytest.raises(ModelError, match=r"tensor blocks\.2\.\S+ is not as config\.json asks for"):
        open_model(saved)
