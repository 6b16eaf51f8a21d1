"""The result of a check, for people and for scripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from engine_bridge.driver.vllm_api.check import Finding
from engine_bridge.driver.vllm_api.features import FEATURES, Feature
from engine_bridge.driver.vllm_api.uses import Owner


class FeatureReport(Struct, frozen=True):
    """One feature: how many names of vLLM's it depends on, and which of them have moved."""

    feature: Feature
    num_names: int
    findings: tuple[Finding, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        return {
            "feature": self.feature.name,
            "num_names": self.num_names,
            "moved": [{"name": each.where, "problem": each.problem} for each in self.findings],
            "without": self.feature.without,
            "device": self.feature.device,
            "is_vital": self.feature.is_vital,
            "at_start": self.feature.at_start,
        }


def by_feature(owners: Sequence[Owner], findings: Iterable[Finding]) -> list[FeatureReport]:
    """Return one report for each feature, with the findings that concern it."""
    found = list(findings)
    return [
        FeatureReport(
            feature,
            len(set(_names(owners, feature))),
            tuple(each for each in found if each.feature == feature),
        )
        for feature in FEATURES
    ]


def lines(reports: Iterable[FeatureReport]) -> Iterator[str]:
    """Yield a line for each feature, and one for each name that has moved."""
    for report in reports:
        verdict = f"{len(report.findings)} moved" if report.findings else "all there"
        where = f", on {report.feature.device} only" if report.feature.device else ""
        yield f"{report.feature.name:<24}{report.num_names:>4} names: {verdict}{where}"
        for finding in report.findings:
            yield f"    {finding}"
        if report.findings:
            yield f"    so {report.feature.without}"


def can_serve(reports: Iterable[FeatureReport], device: str) -> bool:
    """Return whether no name that serving on this device needs has moved in vLLM."""
    return not any(
        each.findings and each.feature.is_vital and each.feature.matters_on(device) for each in reports
    )


def _names(owners: Sequence[Owner], feature: Feature) -> Iterator[tuple[str, str]]:
    for owner in owners:
        for use in owner.uses:
            if owner.feature_of(use) == feature:
                yield owner.path, use.name
        if not owner.uses and owner.feature == feature:
            yield owner.path, ""
