"""How a prompt is cut into pieces that prepared graphs can take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

# Running a graph at all costs about as much as this many tokens in it (weights are read once per
# piece whatever its size); decides between padding one graph and running several.
PIECE_OVERHEAD_TOKENS = 16


def split(tokens: int, graph_sizes: Sequence[int], longest: int) -> list[int]:
    """Token counts of the pieces of a prompt, in order; they add up to `tokens`.

    Without `graph_sizes` (dynamic shapes) pieces are as long as allowed. With them, each piece is
    padded by the caller to the smallest size that holds it; the pieces minimise
    Σ (padded size + `PIECE_OVERHEAD_TOKENS`), full graphs first.
    """
    if tokens < 1:
        raise ValueError(f"a prompt has at least one token, got {tokens}")
    sizes = tuple(sorted(size for size in graph_sizes if size <= longest))
    if not sizes:
        full, rest = divmod(tokens, longest)
        return [longest] * full + ([rest] if rest else [])
    full = max(0, tokens // sizes[-1] - 1)
    rest = tokens - full * sizes[-1]
    return [sizes[-1]] * full + list(_best(rest, sizes)[1])


def padded_size(tokens: int, graph_sizes: Sequence[int]) -> int:
    """Smallest graph size that holds `tokens`; `tokens` itself without static graphs."""
    if not graph_sizes:
        return tokens
    fitting = [size for size in graph_sizes if size >= tokens]
    if not fitting:
        raise ValueError(f"no graph holds {tokens} tokens, prepared are {sorted(graph_sizes)}")
    return min(fitting)


@lru_cache(maxsize=4096)
def _best(tokens: int, sizes: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Cheapest (cost, pieces) for the rest of a prompt: pad it, or run a full graph and go on."""
    options: list[tuple[int, tuple[int, ...]]] = []
    if tokens <= sizes[-1]:
        options.append((padded_size(tokens, sizes) + PIECE_OVERHEAD_TOKENS, (tokens,)))
    smaller = [size for size in sizes if size < tokens]
    # Only the two largest graphs that fit can be worth filling before padding what remains.
    for size in smaller[-2:]:
        cost, pieces = _best(tokens - size, sizes)
        options.append((cost + size + PIECE_OVERHEAD_TOKENS, (size, *pieces)))
    return min(options, key=lambda option: (option[0], len(option[1])))
