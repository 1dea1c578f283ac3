"""What must never be computed on: keys and values of another beginning, of a load that failed, of a
file that compaction takes away meanwhile. The fake engine checks every value that it computes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero.contexts.compaction import compact
from tests.contexts.fake_service import FakeService

TEXT = [i % 4 for i in range(40)]
CHUNK_BYTES = 12288


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeService]:
    made = FakeService(
        tmp_path, memory=40 * CHUNK_BYTES, disk=400 * CHUNK_BYTES, bits=32, recompute=False
    )
    yield made
    made.close()


def on_disk(service: FakeService, *texts: list[int]) -> Any:
    """A context of application `a`, after calls of these texts, whose chunks are on the disk."""
    held = service.held("a")
    for text in texts:
        service.call(held, text)
        service.swap.drain()
    service.call(service.held("b"), [3] * 40)
    service.swap.drain()
    service.memory.reclaim(service.memory.budget.used)
    return held


@pytest.mark.parametrize("at", [0, 3, 15, 20])
def test_equal_tokens_behind_another_beginning_are_computed_again(
    service: FakeService, at: int
) -> None:
    held = service.held("a")
    service.call(held, TEXT)
    service.swap.drain()
    other = list(TEXT)
    other[at] = 3 - other[at]
    service.call(held, [*other, *[1] * 5])


def test_a_load_that_failed_behind_a_refused_call_is_seen_by_the_next(service: FakeService) -> None:
    held = on_disk(service, TEXT)
    for path in service.folder.glob("a/*.kv"):
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    def refused(_: Any) -> Iterator[None]:
        raise ValueError("temperature must be >= 0")
        yield

    with pytest.raises(ValueError, match="temperature"):
        list(service.working.answering(held, [*TEXT, 1], refused))
    service.call(held, [*TEXT, 1])


@pytest.mark.parametrize("read", [1, 2, 4])
def test_compaction_leaves_what_is_read_meanwhile(
    service: FakeService, monkeypatch: pytest.MonkeyPatch, read: int
) -> None:
    longer = [*TEXT, *[1] * 9]
    held = on_disk(service, TEXT, longer)  # nobody refers to the last chunk of the first any more
    files = service.files("a")
    assert list(files.garbage(everything=True))
    reading, count = files.read_run, [0]

    def compacted(*arguments: Any) -> Any:
        count[0] += 1
        if count[0] == read:
            compact(files, service.memory, "a", everything=True)
        return reading(*arguments)

    monkeypatch.setattr(files, "read_run", compacted)
    service.call(held, [*longer, 1])
    service.call(held, [*longer, 1, 2])
    assert count[0] >= read


def test_what_came_from_codes_is_not_encoded_again(tmp_path: Path) -> None:
    """Errors would add up: again and again a text's chunks are lost while they are in the cache."""
    service = FakeService(
        tmp_path, memory=40 * CHUNK_BYTES, disk=400 * CHUNK_BYTES, bits=4, recompute=False
    )
    service.active.tolerance = 1 / 15  # of one encoding: 1/16 of the largest
    held, text = on_disk(service, TEXT), list(TEXT)
    for token in [1, 2, 3, 1, 2, 3]:
        service.call(held, text := [*text, token])  # from codes
        service.swap.drain()
        for chunk in held.chunks:
            place, chunk.place = chunk.place, None
            if place is not None:
                service.files("a").drop(place)
        service.memory.reclaim(service.memory.budget.used)
        service.call(held, text := [*text, token])  # nothing is kept, all is in the cache
        service.swap.drain()
        service.call(service.held("b"), [3] * 40)
    service.call(held, [*text, 1])
    service.close()
