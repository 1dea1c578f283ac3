"""The cache of compiled graphs: found again, identical, and never trusted when anything is off."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero.backends import ops
from hetero.backends.errors import DeviceError
from hetero.backends.formats import WeightFormat
from tests.backends.cases import make_tensors, make_weights

qnn = pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)
from hetero.backends.qnn import catalog, graph_store  # noqa: E402

OP = ops.MatMul(n=37, k=64, weight_format=WeightFormat.W4A16)
M = 5
LARGE = ops.MatMul(n=2048, k=2048, weight_format=WeightFormat.W4A16)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(a cache that holds the graph of `OP`, the fresh result)."""
    folder = tmp_path_factory.mktemp("compiled")
    result, counts = compute(folder)
    assert (counts.compiled, counts.loaded) == (1, 1)
    return folder, result


@pytest.fixture
def cache(compiled: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy to damage; `entry` is its only entry."""
    folder = tmp_path / "cache"
    shutil.copytree(compiled[0], folder)
    return folder


def compute(folder: Path | None, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    """(y of a seeded call, what the store did)."""
    random = np.random.default_rng(seed)
    weights = make_weights(OP, random)
    with qnn.open(graph_sizes=(M,), cache=folder, **options) as device:
        tensors = make_tensors(OP, M, np.random.default_rng(1), device=device)
        device.prepare(OP, weights).bind(tensors, M).run()
        return tensors["y"].array.copy(), device.store.counts


def entry(cache: Path) -> Path:
    (found,) = [path for path in cache.iterdir() if not path.name.startswith(".")]
    return found


def test_a_cached_graph_equals_a_fresh_one_bit_for_bit(compiled: tuple[Path, Any]) -> None:
    folder, expected = compiled
    cached, counts = compute(folder)
    assert (counts.compiled, counts.loaded, counts.rebuilt) == (0, 1, [])
    fresh, counts = compute(None)
    assert (counts.compiled, counts.loaded) == (1, 0)
    np.testing.assert_array_equal(cached, expected)
    np.testing.assert_array_equal(fresh, expected)


def test_an_entry_may_be_moved(cache: Path, compiled: tuple[Path, Any], tmp_path: Path) -> None:
    cache.rename(tmp_path / "elsewhere")
    result, counts = compute(tmp_path / "elsewhere")
    assert counts.compiled == 0
    np.testing.assert_array_equal(result, compiled[1])


def flip(name: str, place: float) -> Callable[[Path], None]:
    """One bit changed, `place` of the way through a file."""

    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[int(place * (len(data) - 1))] ^= 0x04
        (folder / name).write_bytes(data)

    return damage


def truncate(name: str, keep: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(keep * len(data))])

    return damage


def rewrite(**changes: Any) -> Callable[[Path], None]:
    """Metadata that is whole but not ours."""

    def damage(folder: Path) -> None:
        fields = json.loads((folder / graph_store.ENTRY).read_text())
        for key, value in changes.items():
            fields[key] = fields[key] | value if isinstance(value, dict) else value
        (folder / graph_store.ENTRY).write_text(json.dumps(fields))

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    **{
        f"{name} flipped at {place}": (flip(name, place), "damaged")
        for name in (graph_store.MODEL, graph_store.BINARY)
        for place in (0, 0.01, 0.3, 0.5, 0.9, 1)
    },
    "metadata flipped": (flip(graph_store.ENTRY, 0.0), "metadata cannot be read"),
    "metadata empty": (truncate(graph_store.ENTRY, 0), "metadata cannot be read"),
    "metadata cut": (truncate(graph_store.ENTRY, 0.7), "metadata cannot be read"),
    "binary empty": (truncate(graph_store.BINARY, 0), "damaged"),
    "binary cut": (truncate(graph_store.BINARY, 0.5), "damaged"),
    "binary gone": (lambda folder: (folder / graph_store.BINARY).unlink(), "missing"),
    "model gone": (lambda folder: (folder / graph_store.MODEL).unlink(), "missing"),
    "metadata gone": (
        lambda folder: (folder / graph_store.ENTRY).unlink(),
        "metadata cannot be read",
    ),
    "other format": (rewrite(format=99), "format is 99"),
    "unknown field": (rewrite(surprise=1), "metadata cannot be read"),
    "other files": (rewrite(files={"../evil": "0"}), "names other files"),
    "other chip": (rewrite(target={"soc_model": "69"}), "another chip"),
    "other SDK": (rewrite(target={"sdk": "2.99.0"}), "another SDK"),
    "other weights": (rewrite(identity={"weights": "0"}), "another graph"),
    "several graphs": (rewrite(graphs=2, files={"graph2.onnx": "0"}), "several graphs"),
    "wrong number of graphs": (rewrite(graphs=2), "names other files"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_entry_is_detected_before_it_is_opened(what: str, cache: Path) -> None:
    damage, reason = DAMAGES[what]
    damage(entry(cache))
    with qnn.open(graph_sizes=(M,), cache=cache) as device:
        fields = graph_store.GraphIdentity(repr(OP), M, weights=weights_digest())
        with pytest.raises(graph_store.DamagedEntryError, match=reason):
            device.store._verify(entry(cache), fields)


def weights_digest() -> str:
    return graph_store.weight_digest(make_weights(OP, np.random.default_rng(0))["weight"], None)


@pytest.mark.full
def test_a_damaged_entry_is_rebuilt(cache: Path, compiled: tuple[Path, Any]) -> None:
    flip(graph_store.BINARY, 0.5)(entry(cache))
    result, counts = compute(cache)
    assert counts.compiled == 1
    assert "graph_qnn.bin is damaged" in counts.rebuilt[0]
    np.testing.assert_array_equal(result, compiled[1])
    assert compute(cache)[1].compiled == 0
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]


def test_other_weights_chips_and_operations_have_other_keys() -> None:
    about = {"chip": "sm8650", "sdk": "1"}
    base = graph_store.GraphIdentity("op", 1, weights="a")
    keys = {
        graph_store.entry_key(identity, target)
        for identity in (
            base,
            graph_store.GraphIdentity("op2", 1, weights="a"),
            graph_store.GraphIdentity("op", 2, weights="a"),
            graph_store.GraphIdentity("op", 1, context=3, weights="a"),
            graph_store.GraphIdentity("op", 1, weights="b"),
        )
        for target in (about, about | {"chip": "sm8750"}, about | {"sdk": "2"})
    }
    assert len(keys) == 15
    assert asdict(base)["weights"] == "a"


def test_weight_digest_sees_every_part() -> None:
    weight = np.arange(6, dtype=np.float32)
    digests = {
        graph_store.weight_digest(weight),
        graph_store.weight_digest(weight.reshape(2, 3)),
        graph_store.weight_digest(weight.astype(np.float16)),
        graph_store.weight_digest(weight, weight),
        graph_store.weight_digest(weight[::-1]),
    }
    assert len(digests) == 5


def test_a_failed_compilation_leaves_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    from hetero.backends.qnn.compiler import GraphCompiler

    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(GraphCompiler, "compile", fail)
    with pytest.raises(KeyboardInterrupt):
        compute(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


SIZES = (1, 32, 64, 128)


def large_graphs() -> list[catalog.Graph]:
    weights = make_weights(LARGE, np.random.default_rng(0))
    digest = graph_store.weight_digest(weights["weight"], None)
    return [catalog.graph(LARGE, m, weights, digest) for m in SIZES]


@pytest.fixture(scope="module")
def shared_original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the graphs of a weight around one binary."""
    folder = tmp_path_factory.mktemp("shared")
    with qnn.open(graph_sizes=SIZES, cache=folder) as device:
        device.store.compile_shared(large_graphs())
        assert device.store.counts.compiled == len(SIZES)
    return folder


@pytest.fixture
def shared_cache(shared_original: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(shared_original, tmp_path / "copy")


def test_shared_weights_are_stored_once(shared_cache: Path) -> None:
    graphs = large_graphs()
    with qnn.open(cache=shared_cache) as device:
        path = device.store.compile_shared(graphs[:2])
        assert device.store.counts.compiled == 0
        one = device.store.compile(*graphs[1])
    found = graph_store.read_entry(path)
    assert found.graphs == len(SIZES)
    assert set(found.files) == {*map(graph_store.shared_name, SIZES), "graph1_qnn.bin"}
    assert found.nbytes < 1.05 * graph_store.read_entry(one).nbytes


def test_a_shared_entry_is_not_opened_by_the_emulator(shared_cache: Path) -> None:
    group = graph_store.group_of(large_graphs()[0].identity)
    with qnn.open(cache=shared_cache) as device:
        with pytest.raises(graph_store.DamagedEntryError, match="the emulator cannot open"):
            device.store._verify(entry(shared_cache), group)
        assert device.store._find_shared(replace(group, tokens=32)) is None


def test_a_device_finds_its_graph_in_a_shared_entry(shared_cache: Path) -> None:
    group = graph_store.group_of(large_graphs()[0].identity)
    with qnn.open(cache=shared_cache) as device:
        target = device.store.target
    real = replace(target, library=replace(target.library, emulated=False))
    phone = graph_store.GraphStore(real, shared_cache)
    assert phone._find_shared(replace(group, tokens=32)) == entry(shared_cache) / "graph32.onnx"
    assert phone._find_shared(replace(group, tokens=96)) is None
    assert phone._find_shared(replace(group, tokens=32, weights="other")) is None
    flip("graph1_qnn.bin", 0.5)(entry(shared_cache))
    assert phone._find_shared(replace(group, tokens=32)) is None
    assert "damaged" in phone.counts.rebuilt[0]


@pytest.mark.parametrize("at", ["scratch", "child"])
def test_a_full_cache_is_done_without(
    compiled: tuple[Path, Any], tmp_path: Path, monkeypatch: Any, caplog: Any, at: str
) -> None:
    """Graphs are compiled in this process, as without a cache; it is said once."""

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    def broken(*_: Any, **__: Any) -> Any:
        raise DeviceError("qnn", "compiling", "Failed to open context cache file.")

    monkeypatch.setattr(graph_store, "try_room", full)
    if at == "scratch":
        monkeypatch.setattr(graph_store, "scratch_directory", full)
    else:
        monkeypatch.setattr(graph_store.GraphCompiler, "compile", broken)
    result, counts = compute(tmp_path / "cache")
    assert (counts.compiled, counts.loaded) == (1, 0)
    np.testing.assert_array_equal(result, compiled[1])
    assert caplog.text.count("keeps no compiled graphs") == 1


def test_what_fails_with_room_in_the_cache_is_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise DeviceError("qnn", "compiling", "NOT_ON_NPU")

    monkeypatch.setattr(graph_store.GraphCompiler, "compile", broken)
    with pytest.raises(DeviceError, match="NOT_ON_NPU"):
        compute(tmp_path / "cache")
