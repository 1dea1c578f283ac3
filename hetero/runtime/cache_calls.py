"""Calls that work on the keys, values and states of the context that a step runs on.

A launch has its addresses bound into it, so a launch of attention exists once for each context that
runs a step. Everything else of the step is shared, and the executor walks bound calls alone: the
choice of the context costs nothing while a step runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from hetero.backends.protocol import BoundCall, Completion, Kernel, Operand
from hetero.runtime.kv.kv_cache import KvCache, number_of
from hetero.runtime.kv.layer_gate import LayerGate
from hetero.runtime.program import PREQUEUE, RUN, SUBMIT, WAIT_LAYER, Action, Launch

LAUNCHING: Final = (SUBMIT, RUN, PREQUEUE)


class CacheCall(BoundCall):
    """A call without its caches.

    `caches` are their slots by port, of the context of `row` where a step has several.
    """

    def __init__(
        self,
        name: str,
        kernel: Kernel,
        operands: Mapping[str, Operand],
        caches: Mapping[str, str],
        m: int,
        row: int = 0,
    ) -> None:
        self.name, self.m, self.row = name, m, row
        self._kernel, self._operands, self._caches = kernel, dict(operands), dict(caches)
        self._bound: weakref.WeakKeyDictionary[KvCache, BoundCall] = weakref.WeakKeyDictionary()

    @property
    def layer(self) -> int:
        """Return the number of the keys and values, or of the state, that it uses."""
        return number_of(next(iter(self._caches.values())))

    def on(self, cache: KvCache) -> BoundCall:
        """Return the call on a context's caches, bound on first use.

        Several steps may share it. Raises what `Kernel.bind` does.
        """
        call = self._bound.get(cache)
        if call is None:
            caches = {port: cache[slot] for port, slot in self._caches.items()}
            call = self._kernel.bind({**self._operands, **caches}, self.m)
            self._bound[cache] = call
        return call

    def run(self) -> None:
        """Raise: the call has no caches."""
        raise self._unbound()

    def submit(self) -> Completion:
        """See `BoundCall.submit`."""
        raise self._unbound()

    def enqueue(self) -> Completion:
        """See `BoundCall.enqueue`."""
        raise self._unbound()

    def _unbound(self) -> ValueError:
        return ValueError(f"{self.name}: a step runs on a context, see Step.on")


def bind_program(
    program: tuple[Action, ...], launches: tuple[Launch, ...], caches: Sequence[KvCache]
) -> tuple[tuple[Action, ...], tuple[Launch, ...]]:
    """Return a step's program and launches bound to the caches of its contexts."""
    calls = {
        index: launch.call.on(caches[launch.call.row])
        for index, launch in enumerate(launches)
        if isinstance(launch.call, CacheCall)
    }
    return (
        tuple(
            action._replace(target=getattr(calls[action.launch], action.target.__name__))
            if action.launch in calls and action.code in LAUNCHING
            else action
            for action in program
        ),
        tuple(
            launch._replace(call=calls[index]) if index in calls else launch
            for index, launch in enumerate(launches)
        ),
    )


def wait_for_layers(
    program: tuple[Action, ...], layers: Mapping[int, int], gate: LayerGate
) -> tuple[Action, ...]:
    """Return a program that waits for a layer before it starts a launch that works on it.

    `layers` are those of such launches; states do not come through the gate.
    """
    actions: list[Action] = []
    for action in program:
        if action.code in LAUNCHING and layers.get(action.launch, gate.layers) < gate.layers:
            wait = partial(gate.wait, layers[action.launch])
            actions.append(Action(WAIT_LAYER, action.launch, action.kind, wait))
        actions.append(action)
    return tuple(actions)
