"""What an operator sees: /proxy/state as JSON and /metrics for Prometheus, read from the parts when asked.

The hot path only counts in plain integers; nothing is computed before somebody looks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from swe_lightning.gateway.upstream import Upstreams

if TYPE_CHECKING:
    from swe_lightning.gateway.app import Gateway


def models(upstreams: Upstreams) -> list[dict[str, Any]]:
    names = ("url", "name", "version", "max_context", "in_flight", "healthy", "checks_failed", "why")
    return [{name: getattr(endpoint, name) for name in names} for endpoint in upstreams.all()]


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
    }


def exposition(gateway: Gateway) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(gateway))
    return generate_latest(registry)


class _Collector:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Any]:
        g, now = self._gateway, state(self._gateway)
        for name in ("in_flight", "waiting", "paused"):
            yield GaugeMetricFamily(f"swel_gateway_{name}", f"Gate: {name}", value=float(now[name]))
        calls = CounterMetricFamily("swel_gateway_calls", "Model calls by result", labels=["result"])
        for result, count in now["calls"].items():
            calls.add_metric([result], count)
        yield calls
        yield CounterMetricFamily("swel_gateway_call_seconds", "Wall time of answered calls", value=g.proxy.seconds)
        yield CounterMetricFamily("swel_gateway_refused", "Calls refused with 429", value=now["refused"])
        yield CounterMetricFamily(
            "swel_gateway_upstream_retries", "Tries beyond the first", value=now["upstream_retries"]
        )
        yield CounterMetricFamily("swel_gateway_commits", "Store transactions", value=now["commits"])
        late = CounterMetricFamily("swel_gateway_late", "Refused because their attempt was over", labels=["kind"])
        for kind, count in now["late"].items():
            late.add_metric([kind], count)
        yield late
        rollouts = GaugeMetricFamily("swel_gateway_rollouts", "Rollouts by state", labels=["state"])
        for name, count in now["rollouts_by_state"].items():
            rollouts.add_metric([str(name)], count)
        yield rollouts
        version = GaugeMetricFamily("swel_gateway_weight_version", "Registered weight version", labels=["url"])
        for model in now["models"]:
            version.add_metric([model["url"]], model["version"])
        yield version
