"""Files are packed once: the store has the same numbers, and only for the file that it is of."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from hetero.backends.host.files import is_in_use
from hetero.errors import ModelError
from hetero.models import open_model
from hetero.models.gguf import GgufWeights, packed_store
from hetero.models.layout import EXPERTS, block_matrices
from hetero.models.model_weights import ModelWeights
from tests.models.gguf_files import PIECES, add_entry, finish, random_blocks, write_mixed


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
    weights = open_model(path).weights
    matrix = weights.embed()
    read_all(weights)
    del weights
    (name,) = kept(stores)
    gc.collect()
    assert is_in_use(stores / name)
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


@pytest.mark.parametrize("prepared", [True, False])
def test_a_model_that_is_given_up_leaves_nothing(
    stores: Path, tmp_path: Path, prepared: bool
) -> None:
    weights = open_model(write_mixed(tmp_path / "m.gguf", np.random.default_rng(0))).weights
    weights.block(0)
    if prepared:
        weights.release_embeddings()
    weights.close()
    assert kept(stores) == []


def test_a_file_that_was_just_written_is_read_again(stores: Path, tmp_path: Path) -> None:
    path = write_mixed(tmp_path / "m.gguf", np.random.default_rng(0))
    for _ in range(2):
        read_all(open_model(path).weights)
    (note,) = stores.glob("*.seen")
    assert note.read_text() == f"\n{path}"  # whose it is, but nothing to tell that it is the same


@pytest.mark.parametrize("writes", [0, 7])
def test_a_disk_that_fills_up_costs_only_the_store(
    stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """Tensors that were packed into it stay, and the others are packed into memory."""
    path = write_mixed(tmp_path / "m.gguf", np.random.default_rng(0))
    wanted = read_all(open_model(path, weights="f32").weights)
    for old in stores.iterdir():
        old.unlink()
    real, done = os.pwrite, itertools.count()

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if next(done) >= writes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    for ours, theirs in zip(read_all(open_model(path, weights="f32").weights), wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert kept(stores) == []


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_first_opening_uses_what_it_packs_from_the_mapped_store(
    stores: Path, tmp_path: Path
) -> None:
    """A matrix that is read again is not packed again, and no weight is in anonymous memory."""
    weights = open_model(write_routed(tmp_path / "m.gguf", Kind.Q8_0)).weights
    for i in range(weights.config.num_layers):
        weights.block(i)
        weights.release(i)
    for i in range(weights.config.num_layers):
        for matrix in block_matrices(weights.config, i):
            for _, part in weights.block(i).matrix(matrix.name).spans():
                assert part.scales is not None
                assert str(stores) in mapped_from(part.data)
                assert str(stores) in mapped_from(part.scales)
    assert all(str(stores) in mapped_from(part.data) for _, part in weights.embed().spans())
    weights.release_embeddings()
    weights.close()


def mapped_from(array: np.ndarray) -> str:
    """The file whose mapping has an array's first byte; empty for anonymous memory."""
    address = array.ctypes.data
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, *fields = line.split(maxsplit=5)
        start, stop = (int(x, 16) for x in span.split("-"))
        if start <= address < stop:
            return fields[4] if len(fields) == 5 else ""
    raise AssertionError("an array without memory")


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.MXFP4])
def test_experts_stay_mapped(kind: Kind, tmp_path: Path) -> None:
    """Opening a packed file again takes no memory of its own for its weights."""
    path = write_routed(tmp_path / "m.gguf", kind)
    weights = open_model(path).weights
    for i in range(weights.config.num_layers):
        weights.block(i)
        weights.release(i)
    weights.embed(), weights.lm_head()
    weights.release_embeddings()
    weights.close()
    del weights
    gc.collect()
    before = anonymous_bytes()
    again = open_model(path).weights
    blocks = [again.block(i) for i in range(again.config.num_layers)]
    spans = [part for block in blocks for x in EXPERTS for _, part in block.matrix(x).spans()]
    assert all(part.data.any() for part in spans)
    assert all(np.isfinite(part.data.sum(dtype=np.float64)) for part in spans)  # reads all
    taken = anonymous_bytes() - before
    assert taken <= 0.15 * path.stat().st_size, f"{taken / path.stat().st_size:.0%}"


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith("RssAnon"))


def write_routed(path: Path, kind: Kind) -> Path:
    """A Qwen3-MoE of 26 million weights, nearly all of them experts'."""
    experts, width, hidden, layers = 32, 512, 256, 2
    entries = {
        "embedding_length": hidden, "block_count": layers, "feed_forward_length": width,
        "context_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.key_length": 64, "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": 259,
        "expert_count": experts, "expert_used_count": 4, "expert_feed_forward_length": width,
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for key, value in entries.items():
        add_entry(writer, f"qwen3moe.{key}", value)
    for key, value in {
        "model": "llama", "tokens": PIECES[:259], "scores": [-float(i) for i in range(259)],
        "token_type": [2, 3, 3, *[6] * 256],
    }.items():  # fmt: skip
        add_entry(writer, f"tokenizer.ggml.{key}", value)
    rng = np.random.default_rng(2)
    matrices = {"token_embd.weight": (259, hidden), "output.weight": (259, hidden)}
    sizes = {"attn_q": 256, "attn_k": 128, "attn_v": 128, "attn_output": hidden}
    routed = {"ffn_gate_exps": (width, hidden), "ffn_up_exps": (width, hidden),
              "ffn_down_exps": (hidden, width)}  # fmt: skip
    vectors = {"output_norm.weight": (hidden,)}
    for i in range(layers):
        matrices |= {f"blk.{i}.{name}.weight": (n, hidden) for name, n in sizes.items()}
        vectors |= {f"blk.{i}.{name}_norm.weight": (hidden,) for name in ("attn", "ffn")}
        vectors |= {f"blk.{i}.attn_{x}_norm.weight": (64,) for x in "qk"}
        vectors[f"blk.{i}.ffn_gate_inp.weight"] = (experts, hidden)
        for name, (n, k) in routed.items():
            blocks = random_blocks(rng, kind, experts * n, k, 0.05).reshape(experts, n, -1)
            writer.add_tensor(f"blk.{i}.{name}.weight", blocks, raw_dtype=kind)
    for name, (n, k) in matrices.items():
        writer.add_tensor(name, random_blocks(rng, kind, n, k, 0.05), raw_dtype=kind)
    for name, shape in vectors.items():
        writer.add_tensor(name, rng.uniform(0.5, 1.0, shape).astype(np.float32))
    finish(writer)
    return path
