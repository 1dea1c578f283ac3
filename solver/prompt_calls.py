"""Splits a prompt into calls: one answer for plans, predictions and the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

# Running a graph at all costs about as much as this many tokens in it (weights are read once per
# call whatever its size); decides between padding one graph and running several.
CALL_OVERHEAD_TOKENS = 16
CHUNK_TOKENS: Final = 256  # mllm-NPU's fixed chunk, or the graph next to it


def split(tokens: int, sizes: Sequence[int], longest: int) -> tuple[int, ...]:
    """Return the token counts of the calls of a prompt, in order; they add up to `tokens`.

    Without `sizes` (any count costs what it has) calls are as long as allowed, and the last one is
    the rest. With them, each call is padded to the smallest size that holds it; the calls minimise
    Σ (padded size + `CALL_OVERHEAD_TOKENS`), the largest first.
    """
    if tokens < 1:
        raise ValueError(f"a prompt has at least one token, got {tokens}")
    usable = tuple(sorted(size for size in sizes if size <= longest))
    if not usable:
        full, rest = divmod(tokens, longest)
        return (longest,) * full + ((rest,) if rest else ())
    full = max(0, tokens // usable[-1] - 1)
    rest = tokens - full * usable[-1]
    return (usable[-1],) * full + _best(rest, usable)[1]


def padded_size(tokens: int, graph_sizes: Sequence[int]) -> int:
    """Return smallest graph size that holds `tokens`; `tokens` itself without static graphs."""
    if not graph_sizes:
        return tokens
    fitting = [size for size in graph_sizes if size >= tokens]
    if not fitting:
        raise ValueError(f"no graph holds {tokens} tokens, prepared are {sorted(graph_sizes)}")
    return min(fitting)


@lru_cache(maxsize=4096)
def _best(tokens: int, sizes: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the cheapest (cost, calls) for the rest of a prompt.

    Pad it, or run a full graph and go on.
    """
    options: list[tuple[int, tuple[int, ...]]] = []
    if tokens <= sizes[-1]:
        options.append((padded_size(tokens, sizes) + CALL_OVERHEAD_TOKENS, (tokens,)))
    smaller = [size for size in sizes if size < tokens]
    # Only the two largest graphs that fit can be worth filling before padding what remains.
    for size in reversed(smaller[-2:]):
        cost, calls = _best(tokens - size, sizes)
        options.append((cost + size + CALL_OVERHEAD_TOKENS, (size, *calls)))
    return min(options, key=lambda option: (option[0], len(option[1])))


def chunk_size(graph_sizes: Iterable[int], longest: int) -> int:
    """Return the graph size of a chunk; without graphs as many tokens, at most the longest call."""
    sizes = [g for g in graph_sizes if g > 1]
    return min(sizes, key=lambda g: abs(g - CHUNK_TOKENS)) if sizes else min(longest, CHUNK_TOKENS)
