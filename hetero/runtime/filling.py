"""Computes what a context lacks (`hetero.runtime.holes`) before, or together with, what follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from hetero.backends.errors import DeviceError
from hetero.backends.protocol import prepared_sizes
from hetero.runtime.deployment import Deployment
from hetero.runtime.holes import TextPiece, cut, without
from hetero.runtime.kv.context import Context
from hetero.runtime.step import Step
from hetero.runtime.step_runner import StepRunner


class Fills(Protocol):
    """An engine, as far as it is needed here."""

    deployment: Deployment
    runner: StepRunner
    before_step: Callable[[], bool | None]

    def drop(self, error: DeviceError) -> None:
        """Continue without the device that failed."""

    def prompt_calls(
        self, context: Context, tokens: Sequence[int], *, head: bool = True
    ) -> Iterator[tuple[Step, bool]]:
        """Yield each call's step and whether it is the last."""


def scatters(deployment: Deployment) -> bool:
    """Return whether a call of a prompt can have tokens from several places of a context.

    Not where attention is inside a graph of several operations, which knows one position.
    """
    placement, sizes = deployment.placement, _piece_sizes(deployment)
    graph = placement.graph
    inside = placement.non_matmul("prefill") == "npu" and any(
        group.fixed for group in placement.groups.values()
    )
    whole = not graph.stateful and graph.prompt_layers == graph.layers
    return whole and not inside and not placement.online and (not sizes or sizes[0] == 1)


def _piece_sizes(deployment: Deployment) -> tuple[int, ...]:
    kind = deployment.placement.non_matmul("prefill")
    return prepared_sizes(deployment.devices[kind].capabilities)


def recover(engine: Fills, context: Context) -> None:
    """Compute what a context lacks: its holes, and what a step that did not end has spoilt."""
    for lost in ((), context.recover()):
        if lost or context.holes:
            for _ in engine.prompt_calls(context, lost, head=False):
                pass


def filled(
    engine: Fills, context: Context, tokens: Sequence[int], *, head: bool
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
        elif not scatters(engine.deployment):
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


def _next(engine: Fills, context: Context, more: int) -> list[TextPiece]:
    """Return the next call, of as many tokens as the plan has a call for."""
    deployment = engine.deployment
    steps, sizes = deployment.placement.plan.steps, _piece_sizes(deployment)
    prompt = context.cached, context.cached + more
    count = sum(stop - start for start, stop in context.holes) + more
    while True:
        count = steps(count)[0]
        pieces = cut(context.holes, prompt, count, sizes, deployment.pool.tokens)
        tokens = sum(piece.tokens for piece in pieces)
        if tokens == count == steps(count)[0]:
            return pieces
        count = tokens


def _again(engine: Fills, context: Context) -> None:
    """Compute all from the first hole on."""
    if context.gate is not None:  # the thread behind it still fills rows
        context.gate.wait(context.gate.layers - 1)
    first = context.holes[0][0]
    text = context.tokens[first : context.cached]
    context.rewind(first)
    for _ in engine.prompt_calls(context, text, head=False):
        pass
