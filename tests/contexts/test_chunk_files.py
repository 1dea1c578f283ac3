"""Chunks that are read together: the same as one by one, and which of them is damaged."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero.contexts.budget import ByteBudget
from hetero.contexts.chunk_files import ChunkFiles, Reader
from hetero.contexts.chunk_format import ChunkError
from hetero.contexts.chunks import Chunk
from hetero.contexts.codec import (
    CHUNK_TOKENS,
    HALF,
    MIXED,
    RAW,
    ChunkCodec,
    Codes,
    LayerBytes,
    Plane,
    codec_of,
)
from hetero.runtime.kv.kv_cache import CacheLayout
from tests.contexts.fake_service import LAYOUT
from tests.support.selection import examples

CODEC = ChunkCodec(LAYOUT, mixed=[[(8, [2, 6], 6, 2)[i % 4] for i in range(LAYOUT.layers)]])
KINDS = st.lists(
    st.tuples(st.sampled_from([RAW, HALF, MIXED, 8, 4, 2]), st.sampled_from([8, 4, 2])),
    min_size=1,
    max_size=9,
)


def written(
    folder: Path, kinds: list[tuple[int, int]]
) -> tuple[ChunkFiles, list[Chunk], list[Any]]:
    """Chunks of these bits in one file, and what they hold; the last is unfinished."""
    files, random = (
        ChunkFiles(folder, CODEC, ByteBudget(1 << 30)),
        np.random.default_rng(len(kinds)),
    )
    chunks, codes = [], []
    for i, (bits, _) in enumerate(kinds):
        tokens = CHUNK_TOKENS if i + 1 < len(kinds) or bits != RAW else 5
        shape = LAYOUT.layers, 2, LAYOUT.kv_heads, tokens, LAYOUT.head_dim
        codes.append(CODEC.encode(random.standard_normal(shape).astype(np.float32), bits))
        chunks.append(Chunk("", bytes([i]), 0, (0,) * tokens, bits))
    places = files.write(list(zip(chunks, codes, strict=True)))
    for chunk, place in zip(chunks, places, strict=True):
        chunk.place = place
    return files, chunks, codes


def whole_of(plane: Plane) -> Any:
    return plane.data if isinstance(plane, LayerBytes) else plane


def every_layer(reader: Reader, into: list[Codes]) -> None:
    for layer in range(LAYOUT.layers):
        reader.layer(layer, into)


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds=KINDS, seed=st.integers(0, 9))
def test_neighbours_are_read_as_they_were_written(
    tmp_path: Path, kinds: list[tuple[int, int]], seed: int
) -> None:
    """In any order, in fewer bits than there are, into memory that was poisoned."""
    files, chunks, codes = written(tmp_path, kinds)
    random = np.random.default_rng(seed)
    order = random.permutation(len(kinds)) if seed else np.arange(len(kinds))
    order = order[: max(1, len(order) - seed % 3)]
    lowered = [
        codes[i].lowered(min(codes[i].bits, kinds[i][1])) if codes[i].bits <= 8 else codes[i]
        for i in order
    ]
    found: list[Codes] = []
    for each in lowered:
        empty = CODEC.empty(each.tokens, each.bits)
        for plane in empty.planes:
            whole_of(plane)[:] = 0xA5
        found.append(empty)
    with closing(files.reader([chunks[i] for i in order])) as reader:
        every_layer(reader, found)
    for a, b in zip(found, lowered, strict=True):
        for one, other in zip(a.planes, b.planes, strict=True):
            np.testing.assert_array_equal(whole_of(one), whole_of(other))


@pytest.mark.parametrize("damaged", [0, 2, 5])
@pytest.mark.parametrize("how", ["bit", "cut", "unreadable"])
def test_the_chunk_that_is_damaged_is_named(
    tmp_path: Path, how: str, damaged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, chunks, codes = written(tmp_path, [(8, 8)] * 6)
    (path,) = tmp_path.glob("*.kv")
    data = path.read_bytes()
    last = data.rfind(codes[damaged].planes[2][-1].tobytes())
    if how == "bit":
        path.write_bytes(data[:last] + bytes([data[last] ^ 1]) + data[last + 1 :])
    elif how == "cut":
        path.write_bytes(data[: last + 1])
    if how == "unreadable":
        read = ChunkFiles.read_run

        def failing(self: Any, file: Any, run: Any, layer: int, buffer: Any) -> int:
            wanted = [place.index for place, _ in run]
            whole = getattr(file, "file", file)  # not broken twice
            return read(self, _Broken(whole, damaged in wanted), run, layer, buffer)

        monkeypatch.setattr(ChunkFiles, "read_run", failing)
    found = [CODEC.empty(CHUNK_TOKENS, 8) for _ in chunks]
    with closing(files.reader(chunks)) as reader:
        with pytest.raises(ChunkError):
            every_layer(reader, found)
        assert reader.at == damaged


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds=KINDS, seed=st.integers(0, 9))
def test_layers_of_several_sizes_take_what_each_needs(
    tmp_path: Path, kinds: list[tuple[int, int]], seed: int
) -> None:
    """They are read, copied to another file and scrubbed at places of their own."""
    heads = ((2, 8), (1, 64), (2, 8), (1, 16))
    layout = CacheLayout(layers=4, kv_heads=2, head_dim=8, capacity=64, heads_of=heads)
    codec, random = codec_of(layout, mixed=[[6, 2, 8, 3]]), np.random.default_rng(seed)
    files = ChunkFiles(tmp_path, codec, ByteBudget(1 << 30))
    chunks, codes = [], []
    for i, (bits, _) in enumerate(kinds):
        shapes = [(2, count, CHUNK_TOKENS, size) for count, size in heads]
        values = [random.standard_normal(x).astype(np.float32) for x in shapes]
        codes.append(codec.encode(values, bits))
        chunks.append(Chunk("", bytes([i]), 0, (0,) * CHUNK_TOKENS, bits))
    pairs = list(zip(chunks, codes, strict=True))
    for chunk, place in zip(chunks, files.write(pairs), strict=True):
        chunk.place = place
    number = chunks[0].place.file if chunks[0].place is not None else 0
    (path,) = tmp_path.glob(f"{number:08d}.kv")
    assert sum(x.nbytes for x in codes) < path.stat().st_size <= files.nbytes(pairs)

    def check(wanted: list[Chunk]) -> None:
        found = [codec.empty(CHUNK_TOKENS, x.bits) for x in wanted]
        with closing(files.reader(wanted)) as reader:
            for layer in range(4):
                reader.layer(layer, found)
        for chunk, each in zip(wanted, found, strict=True):
            for one, other in zip(each.planes, codes[chunks.index(chunk)].planes, strict=True):
                assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))

    check([chunks[i] for i in random.permutation(len(chunks))])
    kept = chunks[::2]
    for chunk in chunks[1::2]:
        assert chunk.place is not None
        files.drop(chunk.place)
    assert files.scrub(number)
    check(kept)
    for chunk, place in files.copy(number, kept).items():
        chunk.place = place
    files.remove(number)
    check(kept)


class _Broken:
    """A file whose bytes the disk does not give."""

    def __init__(self, file: Any, broken: bool) -> None:
        self.file, self.broken = file, broken

    def seek(self, offset: int) -> None:
        self.file.seek(offset)

    def readinto(self, data: memoryview) -> Any:
        if self.broken:
            raise OSError(5, "Input/output error")
        return self.file.readinto(data)
