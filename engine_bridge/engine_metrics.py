"""vLLM's own figures (`vllm:…`) in Prometheus' text: taken in the engine's process, shown by the gateway, which may be another process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import REGISTRY, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

PREFIX = "vllm:"


class Families(Collector):
    """Metric families that exist already, for `generate_latest`."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        """Return the families."""
        return self._families


def engine_metrics() -> str:
    """Return vLLM's figures in this process. Takes milliseconds: not for the event loop."""
    return _text(family for family in REGISTRY.collect() if family.name.startswith(PREFIX))


def own_metrics(registry: CollectorRegistry) -> bytes:
    """Return all figures of a registry but vLLM's, as Prometheus reads them."""
    return _text(family for family in registry.collect() if not family.name.startswith(PREFIX)).encode()


def joined(texts: Mapping[str, str]) -> str:
    """Return the texts of several nodes as one: one family of each name, every figure with the label `node`. texts: by node."""
    families: dict[str, Metric] = {}
    for node, text in texts.items():
        for family in text_string_to_metric_families(text):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known.samples += [
                sample._replace(labels=sample.labels | {"node": node}) for sample in family.samples
            ]
    return _text(families.values())


def _text(families: Iterable[Metric]) -> str:
    return generate_latest(Families(families)).decode()
