"""Free space on the disk: rewrite files without unreferenced chunks, and drop the oldest files."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hetero.contexts.chunk_files import ChunkFiles
from hetero.contexts.chunk_format import ChunkError
from hetero.contexts.chunk_memory import ChunkMemory
from hetero.contexts.chunks import Chunk, Place
from hetero.contexts.unbound import UnboundApps, UnboundFile

Files = Callable[[str], ChunkFiles]


def compact(files: ChunkFiles, memory: ChunkMemory, app: str, *, everything: bool = False) -> None:
    """Rewrite an app's files of which less than half is referenced.

    With `everything` any file with an unreferenced chunk is rewritten. A damaged chunk is dropped
    from the disk. Where there is no room for a copy the file stays; with `everything` its
    unreferenced chunks are then overwritten in place.
    """
    for number in list(files.garbage(everything=everything)):
        chunks = _by_place(memory, app, number)
        try:
            places = _copied(files, number, list(chunks.values()))
        except OSError:
            if not everything or files.scrub(number):
                continue
            places = {}
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
    nbytes: int,
    memory: ChunkMemory,
    files: Files,
    free: Callable[[], int],
    keep: set[Chunk],
    unbound: UnboundApps | None = None,
) -> bool:
    """Remove the least recently used files until `nbytes` are free; return whether they are.

    Chunks that are also in memory stay there. The age of an unbound app's file is the time when it
    was written.
    """
    with memory.lock:
        used: dict[tuple[str, int], int] = {}
        chunks_in: dict[tuple[str, int], list[Chunk]] = {}
        for chunk in memory.table:
            if chunk.place is not None:
                key = chunk.app, chunk.place.file
                used[key] = max(used.get(key, 0), chunk.used)
                chunks_in.setdefault(key, []).append(chunk)
    ages: list[tuple[int, tuple[str, int] | UnboundFile]] = [(at, key) for key, at in used.items()]
    ages += [(file.written, file) for file in ([] if unbound is None else unbound.files())]
    for _, oldest in sorted(ages, key=lambda pair: pair[0]):
        if free() >= nbytes:
            break
        if not isinstance(oldest, UnboundFile):
            with memory.lock:
                if any(chunk in keep or chunk.pins for chunk in chunks_in[oldest]):
                    continue
                for chunk in chunks_in[oldest]:
                    chunk.place = None
            files(oldest[0]).remove(oldest[1])
        elif unbound is not None:
            unbound.remove(oldest)
    return free() >= nbytes


def _by_place(memory: ChunkMemory, app: str, number: int) -> Mapping[Place, Chunk]:
    with memory.lock:
        return {
            chunk.place: chunk
            for chunk in memory.table
            if chunk.app == app and chunk.place is not None and chunk.place.file == number
        }


def _copied(files: ChunkFiles, number: int, chunks: list[Chunk]) -> dict[Chunk, Place]:
    """Return the new places of chunks; none where the file cannot be read.

    Raises `OSError` where a copy cannot be written.
    """
    try:
        return files.copy(number, chunks)
    except ChunkError:
        return {}
