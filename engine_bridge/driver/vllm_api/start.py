"""What becomes of a server whose vLLM is not the one that it was written for: what can be done without is off, and the log says so."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable
from functools import cache
from typing import Any, Literal, TypeVar

import msgspec

from engine_bridge.driver.vllm_api.check import Finding, check, check_engine
from engine_bridge.driver.vllm_api.features import Feature
from engine_bridge.driver.vllm_api.inventory import ENGINE_SIDE, SERVING_SIDE
from engine_bridge.driver.vllm_api.live import Live
from engine_bridge.protocol.errors import SeamMoved

log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=msgspec.Struct)
Off = frozenset[Feature]


def engine_off(device: str) -> Off:
    """What an engine has to do without. Imports all of vLLM that it uses. Raises SeamMoved."""
    return features_off(_moved("engine"), device)


def serving_off(device: str) -> Off:
    """What the APIs before it have to do without. Imports all of vLLM that they use. Raises SeamMoved."""
    return features_off(_moved("serving"), device)


def built_off(engine: Any, device: str, off: Off) -> Off:
    """What a built `LLMEngine` has to do without: `off`, and what only the engine itself can tell. Raises SeamMoved."""
    findings = [each for each in check_engine(ENGINE_SIDE, engine) if each.feature not in off]
    return off | features_off(findings, device, is_built=True)


@cache
def _moved(side: Literal["engine", "serving"]) -> tuple[Finding, ...]:
    """In the installed vLLM, which stays the same: asked for once.

    No garbage is collected meanwhile, and what was imported is left out of later collections: a start took 11 s on two cores, of which 3 s were
    collections that found next to nothing.
    """
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        return tuple(check(ENGINE_SIDE if side == "engine" else SERVING_SIDE, Live()))
    finally:
        if is_collecting:
            gc.freeze()
            gc.enable()


def features_off(findings: Iterable[Finding], device: str, *, is_built: bool = False) -> Off:
    """What a server on this device has to do without; each finding goes to the log. Raises SeamMoved for what it cannot do without.

    is_built: the engine runs already, with all that is built into it.
    """
    findings = [each for each in findings if each.feature.at_start and each.feature.matters_on(device)]
    for each in findings:
        log.error("vLLM has moved: %s. Without %s: %s.", each, each.feature.name, each.feature.without)
    vital = [each for each in findings if each.feature.is_vital or (is_built and each.feature.is_built_in)]
    if vital:
        raise SeamMoved("vLLM has moved, and nothing can be served: " + "; ".join(map(str, vital)))
    return frozenset(each.feature for each in findings)


def without(config: Config, off: Iterable[Feature]) -> Config:
    """The settings with which these features are off."""
    changes = {name: value for feature in off for name, value in feature.settings or ()}
    return msgspec.structs.replace(config, **changes) if changes else config
