"""The greatest length of calls, a plan on devices with caches as long as that, and its memory."""

from __future__ import annotations

from typing import Final, TypedDict

from hetero.backends.formats import CacheFormat, WeightFormat
from hetero.backends.ops import STATE_PORTS
from hetero.backends.protocol import port_shape
from hetero.models.config import ModelConfig
from hetero.models.graph import Shadows, model_graph
from hetero.models.sliding import Sliding
from hetero.runtime.kv.kv_cache import CacheLayout, number_of
from hetero.runtime.pool import nbytes_of, slot_shapes
from hetero.runtime.prefill_mode import WINDOW, max_in_flight
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.matmul_entries import CapabilitiesByDevice, PlanSource
from hetero.solver.placement import Placement, fitted, reach

SCORING_PIECE: Final = 32  # tokens of a call whose logits are all wanted
LONGEST_VERIFIED: Final = 8  # tokens of a step that decodes: of one context, or of as many


class Caches(TypedDict):
    """The options of caches: their length, their format, and whether all tokens stay."""

    max_seq_len: int
    kv: CacheFormat
    whole: bool


def pool_bytes(
    config: ModelConfig,
    max_seq_len: int,
    longest: int,
    shadows: Shadows | None = None,
    kv: CacheFormat = CacheFormat.F32,
    *,
    whole: bool = False,
) -> int:
    """Return an upper bound of the pool and one context.

    It is for calls of up to `longest` tokens, padded to twice as many.
    """
    slots = slot_shapes(config, tokens=3 * longest, logit_rows=SCORING_PIECE, shadows=shadows)
    written = None if whole else (WINDOW + 1) * longest
    cache = cache_layout(config, max_seq_len + 2 * longest, kv, written=written)
    return sum(nbytes_of(shape) for shape in slots.values()) + cache.nbytes


def cache_layout(
    config: ModelConfig,
    capacity: int,
    kv: CacheFormat = CacheFormat.F32,
    *,
    written: int | None = None,
) -> CacheLayout:
    """Return the caches of a model, for `capacity` tokens.

    Where layers have windows and a step writes up to `written` tokens, those layers' caches have
    what such a step needs (None: all tokens).
    """
    attending = config.cached_layers
    sizes = [config.at(i) for i in attending]
    return CacheLayout(
        layers=len(attending),
        states=_states(config) if set(config.mixers) != {"attention"} else (),
        kv_heads=config.kv_heads,
        capacity=capacity,
        head_dim=config.head_dim,
        kv=kv,
        heads_of=tuple((x.kv_heads, x.head_dim) for x in sizes),
        sliding=Sliding.of([config.windows[i] for i in attending], capacity, written),
    )


def _states(config: ModelConfig) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the slots of the layers' states, with their shapes, by their numbers."""
    shapes = {
        slot: port_shape(node.op, port, 1)
        for node in model_graph(config, WeightFormat.F32, capacity=1).nodes
        for port, slot in node.slots.items()
        if port in STATE_PORTS
    }
    return tuple(sorted(shapes.items(), key=lambda x: number_of(x[0])))


def planned_layout(
    plan: ExecutionPlan,
    config: ModelConfig,
    capabilities: CapabilitiesByDevice,
    *,
    max_seq_len: int,
    kv: CacheFormat,
    whole: bool = False,
) -> CacheLayout:
    """Return the caches for a fitted plan's calls in any order; `whole`: of all tokens."""
    # A padded last chunk writes rows after the last token, beyond every context.
    written = reach(plan, capabilities)
    longest = plan.step_tokens or written
    together = max_in_flight(plan, max_seq_len, "best") if len(plan.devices()) > 1 else 1
    most = None if whole else (together - 1) * longest + written
    return cache_layout(config, max_seq_len + written, kv, written=most)


def place(
    plan: ExecutionPlan,
    config: ModelConfig,
    weight_format: WeightFormat,
    capabilities: CapabilitiesByDevice,
    *,
    max_seq_len: int,
    source: PlanSource | None = None,
    shadows: Shadows | None = None,
    kv: CacheFormat = CacheFormat.F32,
    whole: bool = False,
) -> Placement:
    """Return a plan placed on devices with these capabilities.

    Its caches are as long as its calls need them.
    """
    fitting = fitted(plan, capabilities, solved=source is not None)
    layout = planned_layout(
        fitting, config, capabilities, max_seq_len=max_seq_len, kv=kv, whole=whole
    )
    graph = model_graph(
        config,
        weight_format,
        capacity=layout.capacity,
        shadows=shadows,
        kv=kv,
        sliding=layout.sliding if layout.slides else None,
    )
    return Placement(fitting, graph, capabilities, source=source)
