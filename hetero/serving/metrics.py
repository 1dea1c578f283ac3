"""Metrics for Prometheus. No app, prompt or id is a label; all add up over servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from hetero.serving.messages import Done

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """Metrics of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "hetero_requests", "Requests by path's template and status.", ["path", "status"],
            registry=registry,
        )  # fmt: skip
        self.ttft = Histogram(
            "hetero_ttft_seconds", "From the start of a call to its first token.",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.queued = Histogram(
            "hetero_queue_seconds", "From a request's arrival to the start of its call.",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.switch = Histogram(
            "hetero_context_switch_seconds", "Of getting a context in place.", ["cause"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.tokens = Counter("hetero_tokens", "Tokens by kind.", ["kind"], registry=registry)
        self.swap = Counter(
            "hetero_swap_bytes", "Bytes of keys and values.", ["direction"], registry=registry
        )
        self.recomputed = Counter(
            "hetero_recomputed_tokens", "Tokens computed again.", registry=registry
        )
        self.queue = Gauge("hetero_queue_length", "Answers made or waited for.", registry=registry)
        self.engine_requests = Gauge(
            "hetero_engine_requests", "Requests by what they do: running, waiting.", ["state"],
            registry=registry,
        )  # fmt: skip
        self.budget = Gauge(
            "hetero_budget_bytes", "Budgets of contexts.", ["of", "kind"], registry=registry
        )
        self.chunks = Gauge(
            "hetero_context_bytes", "Chunks' bytes.", ["where", "bits"], registry=registry
        )
        self.engine = _Engine()
        registry.register(self.engine)
        for kind in ("prompt", "cached", "completion", "reasoning"):
            self.tokens.labels(kind)

    def answered(self, end: Done, reasoning_tokens: int) -> None:
        """Count a complete answer, of whose tokens so many are thoughts."""
        for kind in ("prompt", "cached", "completion"):
            self.tokens.labels(kind).inc(end.usage[f"{kind}_tokens"])
        self.tokens.labels("reasoning").inc(reasoning_tokens)
        self.queued.observe(end.about["queued_s"])
        self.ttft.observe(end.about["ttft_s"])
        cause = "load" if end.about["loaded_bytes"] else "compute"
        if not end.about["recomputed_tokens"] and cause == "compute":
            cause = "none"
        self.switch.labels(cause).observe(end.about["switch_s"])
        self.swap.labels("in").inc(end.about["loaded_bytes"])
        self.recomputed.inc(end.about["recomputed_tokens"])

    def embedded(self, tokens: int, queued_s: float) -> None:
        """Count a request for embeddings of so many tokens, which waited so long."""
        self.tokens.labels("prompt").inc(tokens)
        self.queued.observe(queued_s)

    def text(self, totals: dict[str, Any], waiting: int) -> bytes:
        """Return the page, with the engine's current counters."""
        self.queue.set(waiting)
        for state, count in totals["requests"].items():
            self.engine_requests.labels(state).set(count)
        for of in ("memory", "disk"):
            for kind, value in totals[of].items():
                self.budget.labels(of, kind).set(value)
        self.chunks.clear()
        for where, bits, nbytes in totals["chunks"]:
            self.chunks.labels(where, bits).set(nbytes)
        self.engine.totals = totals
        return generate_latest(self.registry)


class _Engine(Collector):
    """Counters of the engine process, with their current values."""

    def __init__(self) -> None:
        self.totals: dict[str, Any] = {"evictions": {}, "devices": {}}

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the metrics, as Prometheus' client asks for them."""
        evictions = CounterMetricFamily(
            "hetero_evictions", "Chunks that left the memory.", labels=["reason"]
        )
        for reason, count in self.totals["evictions"].items():
            evictions.add_metric([reason], count)
        busy = CounterMetricFamily(
            "hetero_device_busy_seconds", "Of the devices' calls.", labels=["device"]
        )
        for device, use in self.totals["devices"].items():
            busy.add_metric([device], use["busy_s"])
        yield from (evictions, busy)
