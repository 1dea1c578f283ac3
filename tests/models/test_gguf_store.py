"""Files are packed once: the store has the same numbers, and only for the file that it is of."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from hetero.backends.host.files import is_in_use
from hetero.errors import ModelError
from hetero.models import open_model
from hetero.models.gguf import GgufWeights, packed_store
from hetero.models.layout import block_matrices
from hetero.models.model_weights import ModelWeights
from tests.models.gguf_files import write_mixed


@pytest.fixture(autouse=True)
def stores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(packed_store, "SMALLEST_BYTES", 0)
    monkeypatch.setattr(packed_store, "folder", lambda: tmp_path / "stores")
    return tmp_path / "stores"


def read_all(weights: ModelWeights) -> list[np.ndarray]:
    """Every matrix, as when kernels are prepared."""
    found = []
    for i in range(weights.config.num_layers):
        block = weights.block(i)
        found += [block.matrix(x.name).dequantize() for x in block_matrices(weights.config, i)]
        weights.release(i)
    found += [weights.embed().dequantize(), weights.lm_head().dequantize()]
    weights.release_embeddings()
    weights.close()
    return found


def kept(folder: Path) -> list[str]:
    """Stores; a note of the file that it is of lies beside each."""
    return sorted(x.name for x in folder.iterdir() if x.suffix != ".seen")


@pytest.mark.parametrize("weights", ["gguf-a16", "f32"])
def test_the_second_opening_reads_what_the_first_packed(
    weights: str, stores: Path, tmp_path: Path
) -> None:
    path = write_mixed(tmp_path / "m.gguf", np.random.default_rng(0))
    first = open_model(path, weights=weights)
    wanted = read_all(first.weights)
    assert [x.rpartition(".")[2] for x in kept(stores)] == ["safetensors"]
    path.rename(tmp_path / "moved.gguf")  # another name and time, the same content
    (tmp_path / "moved.gguf").touch()
    again = open_model(tmp_path / "moved.gguf", weights=weights)
    for ours, theirs in zip(read_all(again.weights), wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert isinstance(again.weights, GgufWeights)
    assert isinstance(again.weights._store, packed_store.StoreReader)
    (name,) = kept(stores)
    assert packed_store.origin_of(stores / name) == (tmp_path / "moved.gguf", True)


@pytest.mark.full
def test_a_store_is_held_as_long_as_a_matrix_of_it_is(stores: Path, tmp_path: Path) -> None:
    path = write_mixed(tmp_path / "m.gguf", np.random.default_rng(0))
    read_all(open_model(path).weights)
    (name,) = kept(stores)
    weights = open_model(path).weights
    matrix = weights.lm_head()
    del weights
    gc.collect()
    assert is_in_use(stores / name)
    del matrix
    gc.collect()
    assert not is_in_use(stores / name)


def test_another_file_has_another_store(stores: Path, tmp_path: Path) -> None:
    for seed in range(2):
        path = write_mixed(tmp_path / f"{seed}.gguf", np.random.default_rng(seed))
        read_all(open_model(path).weights)
    assert len(kept(stores)) == 2


def test_what_samples_do_not_show_is_found_before_the_first_token(
    stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_store, "SAMPLES", 1)
    path = write_mixed(tmp_path / "m.gguf", np.random.default_rng(0))
    read_all(open_model(path).weights)
    data = bytearray(path.read_bytes())
    data[-100_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"has changed since it was packed; .* run this again"):
        read_all(open_model(path).weights)
    assert kept(stores) == []
    read_all(open_model(path).weights)
    assert len(kept(stores)) == 1


def test_what_is_quantised_again_is_not_kept(stores: Path, tmp_path: Path) -> None:
    """What that costs is measured on the way, and is to be said every time."""
    path = write_mixed(tmp_path / "m.gguf", np.random.default_rng(0), (Kind.Q4_K,))
    weights = open_model(path, weights="w4a16").weights
    read_all(weights)
    assert weights.requantised()
    assert kept(stores) == []


def test_a_broken_store_is_made_again(stores: Path, tmp_path: Path) -> None:
    path = write_mixed(tmp_path / "m.gguf", np.random.default_rng(0), (Kind.Q4_K, Kind.Q6_K))
    wanted = read_all(open_model(path).weights)
    (found,) = stores.glob("*.safetensors")
    found.write_bytes(found.read_bytes()[:5000])
    for ours, theirs in zip(read_all(open_model(path).weights), wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    exact = gguf.GGUFReader(path)  # type: ignore[no-untyped-call]
    last = next(x for x in exact.tensors if x.name == "output.weight")
    np.testing.assert_array_equal(wanted[-1], gguf.quants.dequantize(last.data, Kind.Q6_K))


def test_the_oldest_stores_go(
    stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_store, "MAX_STORES", 2)
    for seed in range(3):
        path = write_mixed(tmp_path / f"{seed}.gguf", np.random.default_rng(seed), (Kind.Q5_0,))
        read_all(open_model(path).weights)
    assert len(kept(stores)) == 2


def test_a_file_that_was_found_to_be_the_same_is_not_read_again_until_it_changes(
    stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_store, "SAMPLES", 1)
    monkeypatch.setattr(packed_store, "STABLE_S", -1.0)
    path = write_mixed(tmp_path / "m.gguf", np.random.default_rng(0))
    wanted = read_all(open_model(path).weights)
    read_all(open_model(path).weights)  # compares all bytes, and notes that they are the same

    def hashed(file: object, start: int) -> bytes:
        raise AssertionError("a file that did not change was read")

    with monkeypatch.context() as patched:
        patched.setattr(packed_store, "_part_digest", hashed)
        for ours, theirs in zip(read_all(open_model(path).weights), wanted, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[-100_000] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as if nothing had been written
    with pytest.raises(ModelError, match="has changed since it was packed"):
        read_all(open_model(path).weights)


@pytest.mark.parametrize("deferred", [0, 1 << 30])
def test_a_store_is_whole_and_seen_whenever_it_is_written(
    stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deferred: int
) -> None:
    """Beside packing, or behind all of it; its writer knows that it is the file's."""
    monkeypatch.setattr(packed_store, "DEFERRED_BYTES", deferred)
    monkeypatch.setattr(packed_store, "STABLE_S", -1.0)
    path = write_mixed(tmp_path / "m.gguf", np.random.default_rng(0))
    wanted = read_all(open_model(path).weights)
    assert [x.suffix for x in sorted(stores.iterdir())] == [".safetensors", ".seen"]
    again = open_model(path).weights
    monkeypatch.setattr(packed_store, "Content", None)  # nothing is compared
    for ours, theirs in zip(read_all(again), wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_file_that_changes_while_it_is_packed_has_no_store(
    stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_mixed(tmp_path / "m.gguf", np.random.default_rng(0))
    weights = open_model(path).weights
    weights.block(0)
    path.touch()
    read_all(weights)
    assert kept(stores) == []


def test_a_model_that_is_given_up_leaves_nothing(stores: Path, tmp_path: Path) -> None:
    weights = open_model(write_mixed(tmp_path / "m.gguf", np.random.default_rng(0))).weights
    weights.block(0)
    weights.release_embeddings()
    weights.close()
    assert kept(stores) == []


def test_a_file_that_was_just_written_is_read_again(stores: Path, tmp_path: Path) -> None:
    path = write_mixed(tmp_path / "m.gguf", np.random.default_rng(0))
    for _ in range(2):
        read_all(open_model(path).weights)
    (note,) = stores.glob("*.seen")
    assert note.read_text() == f"\n{path}"  # whose it is, but nothing to tell that it is the same


def test_a_store_that_cannot_be_written_leaves_nothing(
    stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_mixed(tmp_path / "m.gguf", np.random.default_rng(0))
    wanted = read_all(open_model(path, weights="f32").weights)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(full))
    for old in stores.iterdir():
        old.unlink()
    for ours, theirs in zip(read_all(open_model(path, weights="f32").weights), wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert kept(stores) == []
