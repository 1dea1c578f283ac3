"""Room on the disk: files are rewritten without what nobody refers to, the oldest chunks leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hetero.contexts.chunk_files import ChunkError, ChunkFiles
from hetero.contexts.chunk_memory import ChunkMemory
from hetero.contexts.chunks import Chunk, Place
from hetero.contexts.codec import Codes

Files = Callable[[str], ChunkFiles]


def compact(files: ChunkFiles, memory: ChunkMemory, app: str, *, everything: bool = False) -> None:
    """Rewrite an app's files of which less than half is referred to; with `everything` any that
    hold something that nobody does. A chunk that cannot be copied is on the disk no more.
    """
    for number in list(files.garbage(everything=everything)):
        chunks, batch = _by_place(memory, app, number), []
        for place, codes in files.copy_live(number):
            if place in chunks:
                batch.append((chunks[place], codes))
        places = _written(files, batch)
        with memory.lock:
            used = any(chunk.pins for chunk in chunks.values())  # a call may be reading it
            for place, chunk in chunks.items():
                if not used and chunk.refs and chunk.place == place:
                    chunk.place = places.get(chunk)
                elif chunk in places:
                    files.drop(places[chunk])
        if used:
            continue
        files.remove(number)


def make_room(
    nbytes: int, memory: ChunkMemory, files: Files, free: Callable[[], int], keep: set[Chunk]
) -> bool:
    """Let the files of the calls that are longest ago go until so many bytes are free; whether they
    are. What is in memory stays there.
    """
    with memory.lock:
        used: dict[tuple[str, int], int] = {}
        held: dict[tuple[str, int], list[Chunk]] = {}
        for chunk in memory.table:
            if chunk.place is not None:
                key = chunk.app, chunk.place.file
                used[key] = max(used.get(key, 0), chunk.used)
                held.setdefault(key, []).append(chunk)
    for key in sorted(used, key=lambda key: used[key]):
        if free() >= nbytes:
            break
        with memory.lock:
            if any(chunk in keep or chunk.pins for chunk in held[key]):
                continue
            for chunk in held[key]:
                chunk.place = None
        files(key[0]).remove(key[1])
    return free() >= nbytes


def _by_place(memory: ChunkMemory, app: str, number: int) -> Mapping[Place, Chunk]:
    with memory.lock:
        return {
            chunk.place: chunk
            for chunk in memory.table
            if chunk.app == app and chunk.place is not None and chunk.place.file == number
        }


def _written(files: ChunkFiles, batch: list[tuple[Chunk, Codes]]) -> dict[Chunk, Place]:
    """New places, none where the disk has no room."""
    try:
        places = files.write(batch) if batch else []
    except (OSError, ChunkError):
        return {}
    return {chunk: place for (chunk, _), place in zip(batch, places, strict=True)}
