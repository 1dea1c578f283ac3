"""Metrics for Prometheus, by model. No app, prompt or id is a label; all add up over servers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from hetero.serving.messages import Done

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
EngineTotals: TypeAlias = tuple[dict[str, Any], int]  # of `controls.totals`, and its queue


class Metrics:
    """Metrics of one server with `models`."""

    def __init__(self, models: Iterable[str]) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "hetero_requests", "Requests by path's template and status.", ["path", "status"],
            registry=registry,
        )  # fmt: skip
        self.ttft = Histogram(
            "hetero_ttft_seconds", "From the start of a call to its first token.", ["model"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.queued = Histogram(
            "hetero_queue_seconds", "From a request's arrival to the start of its call.", ["model"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.switch = Histogram(
            "hetero_context_switch_seconds", "Of getting a context in place.",
            ["model", "cause"], buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.tokens = Counter(
            "hetero_tokens", "Tokens by kind.", ["model", "kind"], registry=registry
        )
        self.swap = Counter(
            "hetero_swap_bytes", "Bytes of keys and values.", ["model", "direction"],
            registry=registry,
        )  # fmt: skip
        self.recomputed = Counter(
            "hetero_recomputed_tokens", "Tokens computed again.", ["model"], registry=registry
        )
        self.loads = Counter(
            "hetero_model_loads", "How often a model was loaded.", ["model"], registry=registry
        )
        self.loaded = Gauge(
            "hetero_model_loaded", "Whether a model is in memory.", ["model"], registry=registry
        )
        self.queue = Gauge(
            "hetero_queue_length", "Answers made or waited for.", ["model"], registry=registry
        )
        self.engine_requests = Gauge(
            "hetero_engine_requests", "Requests by what they do: running, waiting.",
            ["model", "state"], registry=registry,
        )  # fmt: skip
        self.budget = Gauge(
            "hetero_budget_bytes", "Budgets of contexts.", ["model", "of", "kind"],
            registry=registry,
        )  # fmt: skip
        self.chunks = Gauge(
            "hetero_context_bytes", "Chunks' bytes.", ["model", "where", "bits"], registry=registry
        )
        self.engine = _Engine()
        registry.register(self.engine)
        for model in models:
            for kind in ("prompt", "cached", "completion", "reasoning"):
                self.tokens.labels(model, kind)
            for metric in (self.loads, self.recomputed, self.queued, self.ttft):
                metric.labels(model)

    def answered(self, model: str, end: Done, reasoning_tokens: int) -> None:
        """Count a model's complete answer, of whose tokens so many are thoughts."""
        for kind in ("prompt", "cached", "completion"):
            self.tokens.labels(model, kind).inc(end.usage[f"{kind}_tokens"])
        self.tokens.labels(model, "reasoning").inc(reasoning_tokens)
        self.queued.labels(model).observe(end.about["queued_s"])
        self.ttft.labels(model).observe(end.about["ttft_s"])
        cause = "load" if end.about["loaded_bytes"] else "compute"
        if not end.about["recomputed_tokens"] and cause == "compute":
            cause = "none"
        self.switch.labels(model, cause).observe(end.about["switch_s"])
        self.swap.labels(model, "in").inc(end.about["loaded_bytes"])
        self.recomputed.labels(model).inc(end.about["recomputed_tokens"])

    def embedded(self, model: str, tokens: int, queued_s: float) -> None:
        """Count a request for embeddings of so many tokens, which waited so long."""
        self.tokens.labels(model, "prompt").inc(tokens)
        self.queued.labels(model).observe(queued_s)

    def text(self, engines: Mapping[str, EngineTotals | None]) -> bytes:
        """Return the page, with the current counters of each model's engine, if it is loaded."""
        for gauge in (self.queue, self.engine_requests, self.budget, self.chunks):
            gauge.clear()
        self.engine.totals = {}
        for model, engine in engines.items():
            self.loaded.labels(model).set(engine is not None)
            if engine is not None:
                self._set(model, *engine)
        return generate_latest(self.registry)

    def _set(self, model: str, totals: dict[str, Any], waiting: int) -> None:
        self.queue.labels(model).set(waiting)
        for state, count in totals["requests"].items():
            self.engine_requests.labels(model, state).set(count)
        for of in ("memory", "disk"):
            for kind, value in totals[of].items():
                self.budget.labels(model, of, kind).set(value)
        for where, bits, nbytes in totals["chunks"]:
            self.chunks.labels(model, where, bits).set(nbytes)
        self.engine.totals[model] = totals


class _Engine(Collector):
    """Counters of the engine processes, with their current values; they end with the process."""

    def __init__(self) -> None:
        self.totals: dict[str, dict[str, Any]] = {}

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the metrics, as Prometheus' client asks for them."""
        evictions = CounterMetricFamily(
            "hetero_evictions", "Chunks that left the memory.", labels=["model", "reason"]
        )
        busy = CounterMetricFamily(
            "hetero_device_busy_seconds", "Of the devices' calls.", labels=["model", "device"]
        )
        for model, totals in self.totals.items():
            for reason, count in totals["evictions"].items():
                evictions.add_metric([model, reason], count)
            for device, use in totals["devices"].items():
                busy.add_metric([model, device], use["busy_s"])
        yield from (evictions, busy)
