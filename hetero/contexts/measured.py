"""Measurements of a service, made once, of its model (scales, prompt times) and disk."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from hetero.contexts.budget import ByteBudget
from hetero.contexts.chunk_files import ChunkFiles
from hetero.contexts.chunks import Chunk
from hetero.contexts.codec import (
    CHUNK_TOKENS,
    HALF,
    RAW,
    ChunkCodec,
    Codes,
    channel_scales,
)
from hetero.contexts.decoding import ChunkDecoder, HostDecoder
from hetero.contexts.load_plan import Rates
from hetero.contexts.prompt_times import CalibratedTimes, Point, PredictedTimes, PromptTimes
from hetero.errors import UserError
from hetero.runtime.kv.context import Context
from hetero.runtime.kv.layer_gate import LayerGate

MEASURES: Final = 9  # version of what is measured: a folder of another one measures again
SAMPLE_TOKENS: Final = 512
# Prose and code, for scales of channels that fit what people write.
SAMPLE_TEXT: Final = """The harbour lay quiet under a thin rain when the last ferry came in. \
Two men in oilskins threw their ropes, and the captain, who had not \
slept since Tuesday, asked whether the letter from Lisbon had arrived. \
"It has," said the clerk, "but it is not what you hoped for. They \
offer 4,200 for the ship, half of it in May 1998, and nothing at all \
for the cargo."

Photosynthesis converts light into chemical energy: plants take in carbon dioxide and water, \
and release oxygen. Most of it happens in the leaves, whose cells contain chlorophyll. In 1779 \
Jan Ingenhousz showed that plants need light for it; the details of the cycle, however, were \
not known before the 1950s, when carbon-14 made it possible to follow each step.

def read_table(path, separator=","):
    rows = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            fields = [field.strip() for field in line.split(separator)]
            if len(fields) != 3:
                raise ValueError(f"{path}:{number}: expected 3 fields, got {len(fields)}")
            rows.append({"name": fields[0], "price": float(fields[1]), "count": int(fields[2])})
    return rows

Q: How do I cancel my order? A: Open "My account", choose the order and press Cancel. You can \
do this until it has been sent; after that, please write to us (support@example.com) within 14 \
days.

* Mix the flour, the salt and a teaspoon of yeast. * Add 300 ml of warm water, little by \
little. * Knead for ten minutes; let the dough rest, covered, for an hour. Heat the oven to 220 \
degrees.

Theorem. There are infinitely many primes. Proof: suppose that p1, ..., pn are all of them, and \
let N = p1 * p2 * ... * pn + 1. None of them divides N, so a prime divisor of N is not in the \
list.
"""
PROMPTS: Final = (1, 8, 16, 32, 64, 128, 256, 512)
LONGEST_BEFORE: Final = 2048
_BEFORE_S: Final = 2.0
_LONG_RUN_S: Final = 0.2  # what disturbs one does not change it by much
_DISK_BYTES: Final = 4 << 20
_READ_BYTES: Final = 1 << 18

Prefill = Callable[[Sequence[int]], Any]


def sample(vocabulary: int, tokens: int) -> list[int]:
    """Return a text that any model can take, always the same and no user's."""
    return [int(x) for x in np.random.default_rng(0).integers(0, vocabulary, tokens)]


def measure_channels(context: Context, text: Sequence[int], prefill: Prefill) -> dict[str, Any]:
    """Return the scales of the model's key channels on a text.

    Random tokens would not do: of a trained model their keys are other ones.
    """
    tokens = min(len(text), SAMPLE_TOKENS, context.home.max_tokens - 1)
    context.adopt(())
    prefill(text[:tokens])
    values = context.cache.read_layers(0, tokens)
    context.adopt(())
    scales = [channel_scales(x[None])[0] for x in values]
    return {"channels": [float(x) for layer in scales for x in layer.ravel()]}


def measure_prompts(
    context: Context,
    vocabulary: int,
    prefill: Prefill,
    now: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Return (tokens, tokens before them, seconds) of prompts of several lengths.

    Each is measured after no text and after half of what fits, or after less on a slow device; the
    seconds are the least of three runs, or those of one that is long.
    """
    points, max_tokens = list[list[float]](), context.home.max_tokens - 1
    for before_s in (0.0, _BEFORE_S):
        start = list[int]()
        if before_s and points:
            tokens, _, seconds = points[-1]
            fits = max(round(tokens * before_s / seconds), CHUNK_TOKENS)
            start = sample(vocabulary, min(fits, max_tokens // 2, LONGEST_BEFORE))
        context.adopt(())
        if start:
            prefill(start)
        for tokens in (m for m in PROMPTS if len(start) + m < max_tokens):
            times = list[float]()
            while len(times) < 3 and sum(times) < _LONG_RUN_S:
                context.adopt(start)
                start_s = now()
                prefill(sample(vocabulary, tokens))
                times.append(now() - start_s)
            points.append([tokens, len(start), min(times)])
    context.adopt(())
    return points


def measure_run(
    context: Context,
    vocabulary: int,
    prefill: Prefill,
    now: Callable[[], float] = time.perf_counter,
) -> float | None:
    """Return the seconds that another run of tokens to compute adds to a call.

    A call of one run is compared with one of as many tokens in four, each of lengths that no call
    had before: what it takes to prepare such a call counts, since few texts lack the same chunks.
    None where the context is too short for that.
    """
    length = min(CHUNK_TOKENS, (context.home.max_tokens - 1) // 8)
    if not length:
        return None
    text = sample(vocabulary, 8 * length)
    places = range(length, 7 * length, 2 * length)
    holes = tuple((at, at + length) for at in places)
    one, four = list[float](), list[float]()
    for turn in range(max(1, min(3, (length - 1) // 2))):
        ways = (one, 4 * length, ()), (four, 7 * length, holes)
        # Odd and even lengths, none of them of `PROMPTS`.
        for fewer, (times, stop, missing) in enumerate(ways, start=2 * turn + 1):
            context.adopt(text[:stop])
            context.holes = missing
            start_s = now()
            prefill(text[stop : len(text) - min(fewer, length - 1)])
            times.append(now() - start_s)
    context.adopt(())
    return max((min(four) - min(one)) / 3, 1e-9)


def measure_load(
    context: Context,
    vocabulary: int,
    prefill: Prefill,
    now: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds that it adds to a prompt's call that layers are loaded meanwhile.

    However little is loaded: the call waits for another thread layer by layer. Calls with and
    without a load take turns, after one of each; the seconds are the difference of the least ones.
    """
    length = max(1, min(2 * CHUNK_TOKENS, (context.home.max_tokens - 1) // 2))
    text = sample(vocabulary, length)
    plain, loading = list[float](), list[float]()
    with ThreadPoolExecutor(1, "hetero load") as thread:
        for _ in range(4):
            for times, loads in ((plain, False), (loading, True)):
                context.adopt(())
                gate = _OpenedWhenAsked(context.cache.layout.layers)
                opened = thread.submit(gate.open_all) if loads else None
                context.gate = gate if loads else None
                start_s = now()
                try:
                    prefill(text)
                finally:  # also where no layer has keys and values
                    gate.asked.set()
                times.append(now() - start_s)
                if opened is not None:
                    opened.result()
    context.gate = None
    context.adopt(())
    return max(min(loading[1:]) - min(plain[1:]), 1e-9)


class _OpenedWhenAsked(LayerGate):
    """A gate whose layers are loaded when the first of them is waited for."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.asked = threading.Event()

    def wait(self, layer: int) -> float:
        self.asked.set()
        return super().wait(layer)

    def open_all(self) -> None:
        """Open it, on the loading thread."""
        self.asked.wait(self.deadline_s)
        for _ in range(self.layers):
            self.open()


def measure_disk(folder: Path) -> dict[str, float]:
    """Return the read speed of the disk of `folder`, and the latency of a first small read.

    The file is dropped from the page cache first, as far as the system allows. Raises `UserError`
    where nothing can be written.
    """
    path = folder / "speed"
    try:
        with path.open("wb") as file:
            file.write(np.random.default_rng(0).bytes(_DISK_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with path.open("rb", buffering=0) as file:
            _drop_from_page_cache(file)
            start_s = time.perf_counter()
            while file.read(_READ_BYTES):
                pass
            whole_s = time.perf_counter() - start_s
            firsts = []
            for i in range(5):
                _drop_from_page_cache(file)
                file.seek(i * _DISK_BYTES // 5)
                start_s = time.perf_counter()
                file.read(1)
                firsts.append(time.perf_counter() - start_s)
    except OSError as error:
        raise _unusable(folder, error) from error
    finally:
        path.unlink(missing_ok=True)
    latency_s = sorted(firsts)[2]
    return {
        "read_bytes_per_s": _DISK_BYTES / max(whole_s - latency_s, whole_s / 2, 1e-9),
        "read_latency_s": latency_s,
    }


def _drop_from_page_cache(file: io.FileIO) -> None:
    """Drop a file from the page cache, where the system can."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_chunks(
    context: Context, codec: ChunkCodec, folder: Path, decoders: Iterable[ChunkDecoder]
) -> dict[str, Any]:
    """Return the seconds to decode a chunk into the cache, by bits, and to read one.

    The bytes of the chunk do not count in the latter. Measured as a load works: several chunks,
    layer by layer, from files in the page cache. The figures are those of the decoder that is
    fastest at 8 bits, which is named.
    """
    shape = context.cache.layout
    random, heads = np.random.default_rng(0), map(shape.heads, range(shape.layers))
    sizes = [(2, count, CHUNK_TOKENS, size) for count, size in heads]
    values = [random.standard_normal(x).astype(np.float32) for x in sizes]
    count = max(1, min(16, shape.capacity // CHUNK_TOKENS))
    kinds = (RAW, HALF, *codec.nested, *codec.mixed_bits)
    encoded = {bits: codec.encode(values, bits) for bits in kinds}
    seconds: dict[str, dict[str, float]] = {}
    for decoder in decoders:
        times = {}
        for bits, codes in encoded.items():
            parts = [(CHUNK_TOKENS * i, codes) for i in range(count)]

            def decode(parts: Any = parts, decoder: ChunkDecoder = decoder) -> None:
                for layer in range(codec.layers):
                    decoder.decode(parts, layer, context.cache)

            times[str(bits)] = _min_s(decode) / count
        seconds[decoder.name] = times
    fastest = min(seconds, key=lambda name: seconds[name]["8"])
    try:
        with TemporaryDirectory(dir=folder, prefix="speed-") as made:
            read_chunk_s = _read_s(Path(made), codec, encoded[8], count) / count
    except OSError as error:
        raise _unusable(folder, error) from error
    return {"chunk_s": seconds[fastest], "decodes": fastest, "read_chunk_s": read_chunk_s}


def _read_s(folder: Path, codec: ChunkCodec, codes: Codes, count: int) -> float:
    """Return the seconds of reading `count` chunks, layer by layer."""
    files = ChunkFiles(folder, codec, ByteBudget(1 << 62))
    chunks = [Chunk("", bytes([i]), 0, (0,) * CHUNK_TOKENS, 8) for i in range(count)]
    for chunk, place in zip(chunks, files.write([(c, codes) for c in chunks]), strict=True):
        chunk.place = place

    def read() -> None:
        reader = files.reader(chunks)
        for layer in range(codec.layers):
            reader.layer(layer, [codes] * count)
        reader.close()

    return _min_s(read)


def _unusable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"{folder}: contexts cannot be stored here ({error.strerror or error}): choose another "
        "directory"
    )


def _min_s(run: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        start_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - start_s)
    return min(times)


def rates_of(facts: dict[str, Any]) -> Rates:
    """Return the rates in the stored facts. Damaged facts raise the errors of parsing them."""
    run_s = facts["run_s"]
    prompts, priced = _points(facts["prompts"]), _points(facts["predicted"])
    if not prompts:
        raise ValueError("no times of prompts")
    measured = PromptTimes(prompts)
    return Rates(
        prefill_s=CalibratedTimes(PredictedTimes(priced), measured, prompts)
        if priced
        else measured,
        read_bytes_per_s=_number(facts["read_bytes_per_s"]),
        read_latency_s=_number(facts["read_latency_s"]),
        read_chunk_s=_number(facts["read_chunk_s"]),
        chunk_s={int(bits): _number(x) for bits, x in facts["chunk_s"].items()},
        decodes_overlapped=facts["decodes"] == HostDecoder.name,
        run_s=None if run_s is None else _number(run_s),
        load_s=_number(facts["load_s"]),
    )


def _points(stored: Any) -> list[Point]:
    """Return the stored times of prompts."""
    points = [(int(m), int(before), _number(s)) for m, before, s in stored]
    if any(m < 1 or before < 0 for m, before, _ in points):
        raise ValueError("no times of prompts")
    return points


def _number(value: Any) -> float:
    """Return a stored measurement as a number."""
    number = float(value)
    if not 0 < number < 1e18:
        raise ValueError(f"{number} was not measured")
    return number
