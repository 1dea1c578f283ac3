"""The last hidden states of a text: what the final norm gives, and the output head would read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetero.backends.errors import DeviceError
from hetero.backends.ops import Attention
from hetero.errors import UserError
from hetero.runtime.engine import Engine
from hetero.runtime.kv.context import Context
from hetero.runtime.logits import Logits
from hetero.runtime.sizes import LONGEST_VERIFIED


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


def max_together(engine: Engine, length: int) -> int:
    """Return how many texts of up to `length` tokens one step can read.

    One where attention is inside the graph of a whole block, or reads the keys and values of
    another layer: texts that share a context overwrite these layer by layer.
    """
    placement = engine.placement
    count = min(LONGEST_VERIFIED, placement.longest // length)
    reads = any(isinstance(op, Attention) and op.reads for op in placement.graph.others)
    if count < 2 or reads or placement.online:
        return 1
    return count if placement.joins_at("prefill", count * length) else 1


def states_together(
    engine: Engine, context: Context, texts: Sequence[Sequence[int]], length: int
) -> Logits | None:
    """Return the hidden states [texts, length, d] of texts that are read in one step.

    Each is padded to `length` tokens by its last one, and read on the same empty context, which
    stays empty: what it leaves in the caches the next one overwrites. None where this cannot be
    done (`max_together`, or a device has failed). Raises what `Engine.prefill` does.
    """
    for text in texts:
        engine.check(context, text)
    engine.before_step()
    if len(texts) > max_together(engine, length):
        return None
    context.slide()
    tokens = [token for x in texts for token in [*x, *[x[-1]] * (length - len(x))]]
    try:
        step = engine.runner.run_contexts([context] * len(texts), tokens, segment=length)
    except DeviceError as error:
        engine.drop(error)
        return None
    states = engine.deployment.logits.inputs(context, step, every=True)
    return states.reshape(len(texts), length, -1)
