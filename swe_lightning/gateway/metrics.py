"""What an operator sees: /proxy/state as JSON and /metrics for Prometheus, read from the parts when asked.

The hot path only counts in plain integers (meter.py); nothing is computed before somebody looks. docs/gateway.md
explains every metric, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from swe_lightning.gateway.meter import Histogram
from swe_lightning.gateway.upstream import Upstreams

if TYPE_CHECKING:
    from swe_lightning.gateway.app import Gateway

PREFIX = "swel_gateway_"


def models(upstreams: Upstreams) -> list[dict[str, Any]]:
    names = ("url", "name", "version", "max_context", "in_flight", "healthy", "checks_failed", "why")
    return [{name: getattr(endpoint, name) for name in names} for endpoint in upstreams.all()]


def tables(gateway: Gateway) -> dict[str, int]:
    """Entries of what is kept in memory per rollout, token or call; they go when rollouts end (tokens: at 4,096)."""
    return {
        **gateway.store.kept(),
        "placements": gateway.upstreams.placed,
        "last_prompts": len(gateway.upstreams.replies),
        "open_rollouts": len(gateway.gate),
        "bodies": len(gateway.proxy.bodies),
        "tokens": len(gateway.keyring),
        "spellings": len(gateway.proxy.spellings),
        "tasks": gateway.changes.tasks(),
    }


def state(gateway: Gateway) -> dict[str, Any]:
    """Gate, models, rollouts by state, calls by result since the start, and late arrivals since the run began."""
    store = gateway.store
    return {
        **gateway.gate.state(),
        "models": models(gateway.upstreams),
        "rollouts_by_state": store.counts(),
        "calls": dict(gateway.proxy.results),
        "upstream_retries": gateway.upstreams.retries,
        "late": {kind: int(store.get_meta(f"late_{kind}") or 0) for kind in ("calls", "reports")},
        "commits": store.writer.commits,
        "operations": store.writer.operations,
        "tables": tables(gateway),
    }


def exposition(gateway: Gateway) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(_Collector(gateway))
    return generate_latest(registry)


class _Collector:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        now = state(self._gateway)
        yield from _gate(self._gateway, now)
        yield from _calls(self._gateway, now)
        yield from _models(self._gateway, now)
        yield from _store(self._gateway, now)


def _gate(g: Gateway, now: Mapping[str, Any]) -> Iterator[Metric]:
    yield _gauge("paused", "1 while the gate is paused", float(now["paused"]))
    # Of this process, unlike /proxy/state: what several gateways report can be added up.
    yield _gauge("in_flight", "Calls admitted and not yet recorded, in this process", g.gate.in_flight)
    yield _gauge("waiting", "Calls held back (paused, or no place free), in this process", g.gate.waiting)
    yield _counter("refused", "Calls refused with 429", now["refused"])
    yield _histogram("wait_seconds", "Time that held calls waited", g.gate.waited)


def _calls(g: Gateway, now: Mapping[str, Any]) -> Iterator[Metric]:
    yield _labelled(CounterMetricFamily, "calls", "Model calls by result", "result", now["calls"])
    why = "Recorded calls that may not be trained on"
    yield _labelled(CounterMetricFamily, "untrainable_calls", why, "reason", g.proxy.untrainable)
    yield _histogram("call_seconds", "Answered calls, from arrival to commit", g.proxy.seconds)
    yield _labelled(CounterMetricFamily, "tokens", "Tokens of answered calls", "kind", g.proxy.tokens)
    why = "Refused because their attempt was over (counted in the store)"
    yield _labelled(CounterMetricFamily, "late", why, "kind", now["late"])


def _models(g: Gateway, now: Mapping[str, Any]) -> Iterator[Metric]:
    yield _histogram("upstream_seconds", "Exchanges with model servers", g.upstreams.seconds)
    yield _counter("upstream_retries", "Requests sent again", now["upstream_retries"])
    per_model = (
        (GaugeMetricFamily, "upstream_up", "1 while its health checks succeed", "healthy"),
        (GaugeMetricFamily, "upstream_in_flight", "Calls at this model server", "in_flight"),
        (GaugeMetricFamily, "weight_version", "Registered weight version", "version"),
        (CounterMetricFamily, "upstream_checks_failed", "Health checks that failed", "checks_failed"),
    )
    for kind, name, about, field in per_model:
        yield _labelled(kind, name, about, "url", {model["url"]: model[field] for model in now["models"]})


def _store(g: Gateway, now: Mapping[str, Any]) -> Iterator[Metric]:
    yield _labelled(GaugeMetricFamily, "rollouts", "Rollouts by state", "state", now["rollouts_by_state"])
    yield _histogram("commit_seconds", "Store transactions", g.store.writer.commit_seconds)
    yield _counter("operations", "Changes written; many share a transaction", now["operations"])
    yield _labelled(GaugeMetricFamily, "kept", "Entries of tables in memory", "table", now["tables"])


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, about, value=value)


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, about, value=value)


def _labelled(kind: Any, name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    family: Metric = kind(PREFIX + name, about, labels=[label])
    for key, value in dict(values).items():
        family.add_metric([str(key)], float(value))  # type: ignore[attr-defined]
    return family


def _histogram(name: str, about: str, values: Histogram) -> Metric:
    return HistogramMetricFamily(PREFIX + name, about, buckets=values.cumulative(), sum_value=values.total)
