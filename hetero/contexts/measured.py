"""What a service measures once: of its model (scales, errors, times of prompts) and of its disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from hetero.contexts.codec import ChunkCodec, channel_scales, relative_errors
from hetero.contexts.context import Context
from hetero.contexts.load_plan import Rates, interpolated
from hetero.errors import UserError

SAMPLE_TOKENS: Final = 64
PROMPTS: Final = (1, 16, 64, 128, 256, 512)
_DISK_BYTES: Final = 4 << 20
_PIECE_BYTES: Final = 1 << 18

Prefill = Callable[[Sequence[int]], Any]


def sample(vocabulary: int, tokens: int) -> list[int]:
    """A text of any model, always the same: no user's."""
    return [int(x) for x in np.random.default_rng(0).integers(0, vocabulary, tokens)]


def measure_channels(context: Context, vocabulary: int, prefill: Prefill) -> dict[str, Any]:
    """The scales of the model's key channels, and its errors by bits, of `sample`."""
    tokens = min(SAMPLE_TOKENS, context.home.max_tokens - 1)
    context.adopt(())
    prefill(sample(vocabulary, tokens))
    values = context.cache.read(0, tokens)
    context.adopt(())
    scales = channel_scales(values)
    codec = ChunkCodec(context.cache.layout, scales)
    errors = relative_errors(codec, values)
    return {
        "channels": [float(x) for x in scales.ravel()],
        "errors": {str(bits): error for bits, error in errors.items()},
    }


def measure_prompts(context: Context, vocabulary: int, prefill: Prefill) -> list[list[float]]:
    """Tokens and seconds of prompts of several lengths: the least of three runs of each."""
    found = []
    for tokens in (m for m in PROMPTS if m < context.home.max_tokens):
        times = []
        for _ in range(3):
            context.adopt(())
            start_s = time.perf_counter()
            prefill(sample(vocabulary, tokens))
            times.append(time.perf_counter() - start_s)
        found.append([tokens, min(times)])
    context.adopt(())
    return found


def measure_disk(folder: Path) -> float:
    """Bytes a second of reading pieces from a file there that is not in the system's memory, as far
    as the system lets go of it. Raises `UserError` where nothing can be written.
    """
    path = folder / "speed"
    try:
        with path.open("wb") as file:
            file.write(np.random.default_rng(0).bytes(_DISK_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start_s = time.perf_counter()
            while file.read(_PIECE_BYTES):
                pass
            return _DISK_BYTES / max(time.perf_counter() - start_s, 1e-9)
    except OSError as error:
        raise UserError(
            f"{folder}: contexts cannot be kept here ({error.strerror or error}): choose another "
            "directory"
        ) from error
    finally:
        path.unlink(missing_ok=True)


def measure_decoding(context: Context, codec: ChunkCodec) -> float:
    """Bytes of codes a second that are decoded into a cache."""
    shape = context.cache.layout
    values = np.zeros((shape.layers, 2, shape.kv_heads, 16, shape.head_dim), np.float32)
    codes = codec.encode(values, 8)
    start_s = time.perf_counter()
    for _ in range(4):
        context.cache.write(0, codec.decode(codes))
    return 4 * codes.nbytes / max(time.perf_counter() - start_s, 1e-9)


def rates_of(facts: dict[str, Any]) -> Rates:
    """Of what was measured and kept."""
    return Rates(
        prefill_s=interpolated([(int(m), s) for m, s in facts["prompts"]]),
        read_bytes_per_s=facts["read_bytes_per_s"],
        decode_bytes_per_s=facts["decode_bytes_per_s"],
    )
