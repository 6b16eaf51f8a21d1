"""What becomes of a server whose vLLM is not the one that it was written for: what can be done without is off, and the log says so."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache
from typing import Literal, TypeVar

import msgspec

from engine_bridge.driver.vllm_api.check import Finding, check
from engine_bridge.driver.vllm_api.features import Device, Feature
from engine_bridge.driver.vllm_api.inventory import ENGINE_SIDE, SERVING_SIDE
from engine_bridge.driver.vllm_api.live import Live
from engine_bridge.errors import SeamMoved

log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=msgspec.Struct)
Side = Literal["engine", "serving"]


@cache
def moved(side: Side) -> tuple[Finding, ...]:
    """In the installed vLLM, which is imported. Takes about 10 ms once it is; a process asks only once."""
    return tuple(check(ENGINE_SIDE if side == "engine" else SERVING_SIDE, Live()))


def features_off(findings: Iterable[Finding], device: Device) -> frozenset[Feature]:
    """What a server on this device has to do without; each finding goes to the log. Raises SeamMoved for what it cannot do without."""
    findings = [each for each in findings if each.feature.at_start and each.feature.matters_on(device)]
    for each in findings:
        log.error("vLLM has moved: %s. Without %s: %s.", each, each.feature.name, each.feature.without)
    vital = [str(each) for each in findings if each.feature.is_vital]
    if vital:
        raise SeamMoved("vLLM has moved, and nothing can be served: " + "; ".join(vital))
    return frozenset(each.feature for each in findings)


def without(config: Config, off: Iterable[Feature]) -> Config:
    """The settings with which these features are off."""
    changes = {name: value for feature in off for name, value in feature.settings or ()}
    return msgspec.structs.replace(config, **changes) if changes else config
