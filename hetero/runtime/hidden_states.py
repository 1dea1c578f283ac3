"""The last hidden states of a text: what the final norm gives, and the output head would read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetero.errors import UserError
from hetero.runtime.engine import Engine
from hetero.runtime.kv.context import Context
from hetero.runtime.logits import Logits


def hidden_states(
    engine: Engine, context: Context, tokens: Sequence[int], *, every: bool
) -> Iterator[Logits]:
    """Append tokens; yield for each step the hidden states [rows, d] of its tokens.

    They are those of `every` token, or of the step's last one alone. The output head is not
    computed, unless the last layers are for the rows that it reads alone. Steps of other contexts
    may run between two items. Raises what `Engine.prefill` does.
    """
    engine.check(context, tokens)
    graph = engine.placement.graph
    sampled = graph.prompt_layers < graph.layers
    if sampled and every:
        raise UserError(
            f"{graph.name}: the last {graph.layers - graph.prompt_layers} layers of this model are "
            "computed for the last token of a prompt alone: use the pooling `last`"
        )
    for step, is_last in engine.prompt_calls(context, tokens, head=sampled):
        if is_last or not sampled:
            yield engine.deployment.logits.inputs(context, step, every=every)
