"""Lowered steps by phase and token count, kept for the next call of the same shape."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from hetero.backends.host.gc_pause import gc_paused
from hetero.errors import memory_for
from hetero.runtime.holes import Shape
from hetero.runtime.kernels import OnlineCall
from hetero.runtime.kv.context import Context
from hetero.runtime.launch_costs import LaunchCosts
from hetero.runtime.lowering import Lowering, StepKey
from hetero.runtime.prefill_mode import padded_chunks, rounded
from hetero.runtime.schedule import Orders
from hetero.runtime.step import Step
from hetero.solver.plan import Phase, PrefillMode

MAX_STEPS: Final = 40


class StepCache:
    """The last `MAX_STEPS` lowered steps. Owned by the control thread.

    `pads_chunks`: chunks of a prompt may compute rows after their last token, so that prompts of
    several lengths share a step.
    """

    def __init__(self, orders: Orders, max_seq_len: int, *, pads_chunks: bool) -> None:
        self.orders, self._max_seq_len, self._pads_chunks = orders, max_seq_len, pads_chunks
        self._steps: OrderedDict[StepKey, Step] = OrderedDict()
        self._online: list[OnlineCall] = []  # whose graphs the last prompt prepared
        self._costs: LaunchCosts | None = None

    def clear(self) -> None:
        """Discard all steps and what they prepared."""
        self._steps.clear()
        self._online = []

    def reset(self, lowering: Lowering, costs: LaunchCosts | None) -> None:
        """Discard all steps; lower new ones with `lowering`, ordered by `costs`."""
        self._steps.clear()
        self.lowering, self._costs = lowering, costs

    def step(
        self,
        context: Context,
        phase: Phase,
        m: int,
        logit_rows: int = 1,
        *,
        wait_values: bool = True,
        sums_scores: bool = False,
        band: int | None = None,
    ) -> Step:
        """Return the step of m tokens on a context whose last `logit_rows` rows get logits.

        It is lowered and bound on first use. Steps that decode have wait values where they gain;
        `wait_values` false: the same step without. They are of the `band` of the context's depth,
        unless of a given one. Prompts of an `online-prepare` plan prepare their graphs every time:
        that is what it compares.
        """
        if band is None:
            band = self.band_of([context]) if phase == "decode" else 0
        step = self.lowered(
            phase, m, logit_rows, wait_values=wait_values, sums_scores=sums_scores, band=band
        )
        return self._bound(step, context)

    def band_of(self, contexts: Sequence[Context]) -> int:
        """Return the band of a step that decodes a token of each context: of their mean depth."""
        depth = sum(context.cached for context in contexts) // len(contexts)
        return self.lowering.placement.band_at(depth)

    def window(
        self,
        context: Context,
        chunks: Sequence[int],
        logit_rows: int = 1,
        *,
        sums_scores: bool = False,
        mode: PrefillMode = "cut",
    ) -> Step:
        """Return the step of prompt chunks (tokens of each) that are in flight together."""
        at = rounded(context.cached)
        graph = self.lowering.placement.graph
        # A state is that after the last token, and of the last one there are layers' rows alone.
        exact = graph.stateful or graph.prompt_layers < graph.layers
        if logit_rows == 1 and not sums_scores and self._pads_chunks and not exact:
            chunks = padded_chunks(chunks, self._max_seq_len - context.cached)
        key = StepKey("prefill", tuple(chunks), logit_rows, False, at, sums_scores, mode=mode)
        return self._bound(self._cached(key), context)

    def of_pieces(self, context: Context, pieces: Shape, logit_rows: int) -> Step:
        """Return a prompt's step whose tokens are pieces of a context."""
        count = sum(tokens for tokens, _ in pieces)
        key = StepKey("prefill", (count,), logit_rows, False, pieces=pieces)
        return self._bound(self._cached(key), context)

    def of_contexts(
        self,
        contexts: Sequence[Context],
        *,
        segment: int = 1,
        wait_values: bool = True,
        sums_scores: bool = False,
        band: int | None = None,
    ) -> Step:
        """Return the step that decodes one token of each context, in a band as `step` does.

        With a longer `segment` it reads so many tokens of a prompt on each, without logits.
        """
        count = len(contexts)
        decodes = segment == 1
        if band is None:
            band = self.band_of(contexts) if decodes else 0
        step = self.lowered(
            "decode" if decodes else "prefill",
            count * segment,
            count if decodes else 0,
            wait_values=wait_values,
            sums_scores=sums_scores,
            segment=segment,
            band=band,
        )
        with memory_for(f"the step of {count} contexts"):
            return step.on_segments([context.cache for context in contexts])

    def lowered(
        self,
        phase: Phase,
        m: int,
        logit_rows: int,
        *,
        wait_values: bool = True,
        sums_scores: bool = False,
        segment: int = 0,
        band: int = 0,
    ) -> Step:
        """Return a step that is not bound to any context; see `step`, and `StepKey`."""
        signals = self.lowering.synchroniser.signals
        wait_values = wait_values and not sums_scores and phase == "decode" and bool(signals)
        step = self._cached(
            StepKey(
                phase,
                (m,),
                logit_rows,
                wait_values,
                sums_scores=sums_scores,
                segment=segment,
                band=band,
            )
        )
        if self.lowering.placement.online and phase == "prefill":
            self._prepare_online(step)
        return step

    def _cached(self, key: StepKey) -> Step:
        if key not in self._steps:
            with memory_for(f"the {key.phase} step of {sum(key.chunks)} tokens"):
                self._steps[key] = self._lower(key)
            if len(self._steps) > MAX_STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return self._steps[key]

    @gc_paused()
    def _lower(self, key: StepKey) -> Step:
        if len(key.chunks) == 1:
            (m,) = key.chunks
            return self.lowering.lower(
                key.phase,
                m,
                key.logit_rows,
                wait_values=key.wait_values,
                sums_scores=key.sums_scores,
                segment=key.segment,
                band=key.band,
                pieces=key.pieces,
            )
        assert self._costs is not None
        return self.lowering.lower_chunks(
            key.chunks,
            key.logit_rows,
            cost=self._costs.at(key.position, key.chunks, key.mode),
            submit_s=self._costs.submit_s(self.lowering.devices),
            orders=self.orders,
            sums_scores=key.sums_scores,
            mode=key.mode,
        )

    def _prepare_online(self, step: Step) -> None:
        """Prepare the graphs of a prompt, after those of the previous prompt are freed."""
        for call in self._online:
            call.drop()
        self._online = [c for c in (x.call for x in step.launches) if isinstance(c, OnlineCall)]
        with memory_for(f"the graphs of {step.tokens} tokens"):
            for call in self._online:
                call.prepare()

    @staticmethod
    def _bound(step: Step, context: Context) -> Step:
        if (bound := step.bound.get(context.cache)) is not None:
            return bound
        with memory_for(f"the {step.phase} step of {step.tokens} tokens"):
            return step.on(context.cache)
