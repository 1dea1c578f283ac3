"""Prompts of contexts that lack keys and values in the middle of their text (`Context.holes`).

One call computes the tokens of several holes, and of the prompt behind them: matmuls see all of
them together; what knows a position (the rotary embedding, attention) is a launch for each piece of
a run, at its position, the earlier first. So a token sees the keys of all tokens before it, in each
layer, whether they were loaded or are computed in the same call. A device with static shapes gets
pieces as long as its graphs, since padding would overwrite the rows behind a hole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from hetero.solver.assignments import Span

MOST_PIECES: Final = 16  # of a call


class TextPiece(NamedTuple):
    """Tokens of a call that follow each other from a position on, in a graph of so many."""

    position: int
    tokens: int
    graph: int


Shape: TypeAlias = tuple[tuple[int, int], ...]  # tokens and graph of each piece of a call


def shape_of(pieces: Sequence[TextPiece]) -> Shape:
    """Return what a step of these pieces is lowered for."""
    return tuple((piece.tokens, piece.graph) for piece in pieces)


def cut(
    spans: Sequence[Span], prompt: Span, count: int, sizes: Sequence[int], room: int
) -> list[TextPiece]:
    """Return the pieces of the first `count` tokens of spans and then a prompt, or of fewer.

    They are `MOST_PIECES` at most. Behind the prompt nothing is stored, so its last piece may be
    padded, up to `room` rows of the call. `sizes` are those of static graphs, which begin with 1.
    """
    pieces: list[TextPiece] = []
    row = 0
    for start, stop in (*spans, prompt):
        at = start
        while at < stop and row < count and len(pieces) < MOST_PIECES:
            tokens = graph = min(stop - at, count - row)
            if sizes and graph not in sizes:
                above = [x for x in sizes if x > tokens and row + x <= room]
                graph = above[0] if above and start == prompt[0] else 0
                graph = graph or max(x for x in sizes if x < tokens)
                tokens = min(tokens, graph)
            pieces.append(TextPiece(at, tokens, graph))
            at, row = at + tokens, row + tokens
    return pieces


def without(spans: Sequence[Span], pieces: Sequence[TextPiece]) -> tuple[Span, ...]:
    """Return what is left of spans after the pieces of a call, which took the first tokens."""
    last = pieces[-1]
    done = last.position + last.tokens
    return tuple((max(start, done), stop) for start, stop in spans if stop > done)
