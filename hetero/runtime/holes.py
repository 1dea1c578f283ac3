"""Prompts of contexts that lack keys and values in the middle of their text (`Context.holes`).

One call computes the tokens of several holes, and of the prompt behind them: matmuls see all of
them together; what knows a position (the rotary embedding, attention) is a launch for each piece of
a run, at its position, the earlier first. So a token sees the keys of all tokens before it, in each
layer, whether they were loaded or are computed in the same call. A device with static shapes gets
pieces as long as its graphs, since padding would overwrite the rows behind a hole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from hetero.backends.errors import DeviceError
from hetero.backends.protocol import prepared_sizes
from hetero.solver.assignments import Span

if TYPE_CHECKING:
    from hetero.runtime.engine import Engine
    from hetero.runtime.kv.context import Context
    from hetero.runtime.step import Step

MOST_PIECES: Final = 16  # of a call


class Piece(NamedTuple):
    """Tokens of a call that follow each other from a position on, in a graph of so many."""

    position: int
    tokens: int
    graph: int


Shape: TypeAlias = tuple[tuple[int, int], ...]  # tokens and graph of each piece of a call


def shape_of(pieces: Sequence[Piece]) -> Shape:
    """Return what a step of these pieces is lowered for."""
    return tuple((piece.tokens, piece.graph) for piece in pieces)


def cut(
    spans: Sequence[Span], prompt: Span, count: int, sizes: Sequence[int], room: int
) -> list[Piece]:
    """Return the pieces of the first `count` tokens of spans and then a prompt, or of fewer.

    They are `MOST_PIECES` at most. Behind the prompt nothing is stored, so its last piece may be
    padded, up to `room` rows of the call. `sizes` are those of static graphs, which begin with 1.
    """
    pieces: list[Piece] = []
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
            pieces.append(Piece(at, tokens, graph))
            at, row = at + tokens, row + tokens
    return pieces


def without(spans: Sequence[Span], pieces: Sequence[Piece]) -> tuple[Span, ...]:
    """Return what is left of spans after the pieces of a call, which took the first tokens."""
    last = pieces[-1]
    done = last.position + last.tokens
    return tuple((max(start, done), stop) for start, stop in spans if stop > done)


def scatters(engine: Engine) -> bool:
    """Return whether a call of a prompt can have tokens from several places of a context.

    Not where attention is inside a graph of several operations, which knows one position.
    """
    placement, sizes = engine.placement, _piece_sizes(engine)
    graph = placement.graph
    inside = placement.non_matmul("prefill") == "npu" and any(
        group.fixed for group in placement.groups.values()
    )
    whole = not graph.stateful and graph.prompt_layers == graph.layers
    return whole and not inside and not placement.online and (not sizes or sizes[0] == 1)


def _piece_sizes(engine: Engine) -> tuple[int, ...]:
    kind = engine.placement.non_matmul("prefill")
    return prepared_sizes(engine.devices[kind].capabilities)


def recover(engine: Engine, context: Context) -> None:
    """Compute what a context lacks: its holes, and what a step that did not end has spoilt."""
    for lost in ((), context.recover()):
        if lost or context.holes:
            for _ in engine.prompt_calls(context, lost, head=False):
                pass


def filled(
    engine: Engine, context: Context, tokens: Sequence[int], *, head: bool
) -> Iterator[tuple[Step, int]]:
    """Yield the steps that fill a context's holes, each with how many of `tokens` they took so far.

    These follow the text, and the last of them gets logits, with `head`. They have calls of their
    own where the rows of their scores are wanted. Where the devices have changed and know no such
    call, all from the first hole on is computed again.
    """
    taken = 0
    while context.holes:
        engine.deployment.check_open()
        engine.before_step()
        if context.holes[-1][1] > context.cached:  # all of it is computed again
            context.holes = ()
        elif not scatters(engine):
            _again(engine, context)
        else:
            more = 0 if context.score_stats is not None else len(tokens) - taken
            pieces = _next(engine, context, more)
            at, stop = context.cached, pieces[-1].position + pieces[-1].tokens
            own = tokens[taken : taken + max(stop - at, 0)]
            text = (*context.tokens[:at], *own)
            fed = [x for y in pieces for x in text[y.position : y.position + y.tokens]]
            is_last = taken + len(own) == len(tokens)
            try:
                step = engine.runner.run_pieces(context, pieces, fed, int(head and is_last))
            except DeviceError as error:
                engine.drop(error)
                continue
            context.holes = without(context.holes, pieces)
            context.advance(own)
            taken += len(own)
            if not is_last:
                engine.deployment.logits.check_stream(context, step)
            yield step, taken


def _next(engine: Engine, context: Context, more: int) -> list[Piece]:
    """Return the next call, of as many tokens as the plan has a call for."""
    deployment = engine.deployment
    steps, sizes = engine.plan.steps, _piece_sizes(engine)
    prompt = context.cached, context.cached + more
    count = sum(stop - start for start, stop in context.holes) + more
    while True:
        count = steps(count)[0]
        pieces = cut(context.holes, prompt, count, sizes, deployment.pool.tokens)
        found = sum(piece.tokens for piece in pieces)
        if found == count == steps(count)[0]:
            return pieces
        count = found


def _again(engine: Engine, context: Context) -> None:
    """Compute all from the first hole on."""
    if context.gate is not None:  # the thread behind it still fills rows
        context.gate.wait(context.gate.layers - 1)
    first = context.holes[0][0]
    text = context.tokens[first : context.cached]
    context.rewind(first)
    for _ in engine.prompt_calls(context, text, head=False):
        pass
