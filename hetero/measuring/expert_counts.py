"""Counts of how often the tokens of a text choose each routed expert, for plans that share them."""

from __future__ import annotations

from collections.abc import Sequence

from hetero.errors import UserError
from hetero.generation.llm import LLM
from hetero.measuring.evaluation import DEFAULT_WINDOW, Progress, windows
from hetero.solver.expert_shares import Routing


def count_experts(
    llm: LLM, tokens: Sequence[int], *, window: int = 0, progress: Progress | None = None
) -> Routing:
    """Return the counts of a text, window after window. Raises `UserError` without experts."""
    counts = llm.engine.deployment.count_routes()
    if not counts.layers:
        raise UserError(
            f"{llm.model.name}: has no routed experts to count: leave --count-experts out"
        )
    size = min(window or DEFAULT_WINDOW, llm.max_seq_len)
    for part in windows(len(tokens) + 1, size, size):
        llm.context.truncate(0)
        llm.engine.prefill(llm.context, tokens[part.start : part.stop])
        if progress is not None:
            progress(min(part.stop, len(tokens)), len(tokens))
    layers = {layer: tuple(x.tolist()) for layer, x in counts.layers.items()}
    return Routing(model=llm.model.name, tokens=len(tokens), layers=layers)
