"""How long calls are at most, a plan on devices with caches as long as that, and what it takes."""

from __future__ import annotations

from typing import Final

from hetero.backends.formats import CacheFormat, WeightFormat
from hetero.contexts.kv_cache import CacheLayout
from hetero.models.config import ModelConfig
from hetero.models.graph import Shadows, model_graph
from hetero.runtime.pool import nbytes_of, slot_shapes
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.placement import Able, Placement, PlanSource, fitted, reach

SCORING_PIECE: Final = 32  # tokens of a call whose logits are all wanted
LONGEST_VERIFIED: Final = 8  # tokens of a step that decodes: of one context, or of as many


def pool_bytes(
    config: ModelConfig,
    max_seq_len: int,
    longest: int,
    shadows: Shadows | None = None,
    kv: CacheFormat = CacheFormat.F32,
) -> int:
    """At most what the pool and one context take, for calls of up to `longest` tokens, padded to
    twice as many.
    """
    slots = slot_shapes(config, tokens=3 * longest, logit_rows=SCORING_PIECE, shadows=shadows)
    cache = cache_layout(config, max_seq_len + 2 * longest, kv)
    return sum(nbytes_of(shape) for shape in slots.values()) + cache.nbytes


def cache_layout(
    config: ModelConfig, capacity: int, kv: CacheFormat = CacheFormat.F32
) -> CacheLayout:
    """The caches of a model, for so many tokens."""
    return CacheLayout(
        layers=config.num_layers,
        kv_heads=config.kv_heads,
        capacity=capacity,
        head_dim=config.head_dim,
        kv=kv,
    )


def place(
    plan: ExecutionPlan,
    config: ModelConfig,
    weight_format: WeightFormat,
    capabilities: Able,
    *,
    max_seq_len: int,
    source: PlanSource | None = None,
    shadows: Shadows | None = None,
    kv: CacheFormat = CacheFormat.F32,
) -> Placement:
    """A plan on devices with these capabilities, with caches as long as its calls need them."""
    fitting = fitted(plan, capabilities, solved=source is not None)
    # A padded last piece writes rows behind the last token; they lie beyond every context.
    capacity = max_seq_len + reach(fitting, capabilities)
    graph = model_graph(config, weight_format, capacity=capacity, shadows=shadows, kv=kv)
    return Placement(fitting, graph, capabilities, source=source)
