"""A step's time without the bursts in which a shared machine is slow.

All layers of a model do the same, so the median layer times their number, plus what is outside of
the layers, is what a prompt takes where no burst hits more than half of the layers.
"""

from __future__ import annotations

import itertools
import statistics
from typing import NamedTuple

from hetero.runtime.engine import Engine


class Layers(NamedTuple):
    """Seconds of every layer of one step, and of what is outside of them."""

    layers: list[float]
    outside: float


def layers_of(engine: Engine) -> Layers:
    """The last step's, by the ends of each layer's last call (`Device.set_timing` must be on where
    calls are asynchronous).
    """
    step, stamps = engine.last_step, engine.last_run.stamps
    stopped = {action.launch: stamps[at + 1] for at, action in enumerate(step.program)}
    ends: dict[int, float] = {}
    for place, launch in enumerate(step.launches):
        layer, _, _ = launch.node.partition(".")
        if not layer.startswith("layer"):
            continue
        completion = step.completions[place]
        span = completion.span() if completion is not None else None
        end_s = span[1] if span is not None else stopped.get(place, 0.0)
        number = int(layer.removeprefix("layer"))
        ends[number] = max(ends.get(number, 0.0), end_s)
    order = [ends[i] for i in sorted(ends)]
    found = [later - earlier for earlier, later in itertools.pairwise(order)]
    whole_s = stamps[-1] - stamps[0]
    # The first layer's start is not seen: it counts as another.
    first_s = statistics.median(found)
    return Layers([first_s, *found], whole_s - sum(found) - first_s)


def seconds(steps: list[Layers]) -> float:
    """Of a step, from several of the same kind."""
    layers = [s for step in steps for s in step.layers[1:]]
    outside = statistics.median(step.outside for step in steps)
    return len(steps[0].layers) * statistics.median(layers) + outside
