"""Adapts a server to a vLLM other than the one that it was written for: features that can be left out are off, and the log says so."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, TypeVar

import msgspec

from engine_bridge.driver.vllm_api.check import Finding, check, check_engine
from engine_bridge.driver.vllm_api.features import Feature
from engine_bridge.driver.vllm_api.inventory import ENGINE_SIDE, SERVING_SIDE
from engine_bridge.driver.vllm_api.inventory_beside import SAMPLER_SIDE
from engine_bridge.protocol.errors import SeamMoved

log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=msgspec.Struct)
Off = frozenset[Feature]
WORKER = "driver_worker"
"""The attribute in the paths of the inventory behind which an engine's worker is, where it is in the engine's process."""


def engine_off(device: str) -> Off:
    """Return the features that an engine cannot offer. Imports all of vLLM that it uses. Raises SeamMoved."""
    return features_off(_moved("engine"), device)


def serving_off(device: str) -> Off:
    """Return the features that the APIs in front of the engine cannot offer. Imports all of vLLM that they use. Raises SeamMoved."""
    return features_off(_moved("serving"), device)


def built_off(engine: Any, device: str, off: Off, *, has_ranks: bool) -> Off:
    """Return the features that a built `LLMEngine` cannot offer: `off`, and those found missing on the engine itself. Raises SeamMoved.

    has_ranks: whether its worker is in other processes, where it is not looked at.
    """
    here = [each for each in ENGINE_SIDE if not (has_ranks and WORKER in each.at)]
    findings = [each for each in check_engine(here, engine) if each.feature not in off]
    return off | features_off(findings, device, is_built=True)


@contextmanager
def importing_vllm() -> Iterator[None]:
    """Import vLLM in the block: the garbage collector is off meanwhile, and leaves out later what there is then.

    A start took 11 s on two cores, of which 3 s were collections that found next to nothing.
    """
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.freeze()
            gc.enable()


@cache
def _moved(side: Literal["engine", "serving"]) -> tuple[Finding, ...]:
    """Return the names that have moved in the installed vLLM, which stays the same: the check runs once."""
    with importing_vllm():
        return tuple(check((*ENGINE_SIDE, *SAMPLER_SIDE) if side == "engine" else SERVING_SIDE))


def features_off(findings: Iterable[Finding], device: str, *, is_built: bool = False) -> Off:
    """Return the features that a server on this device ("cpu" or "cuda") cannot offer; each name that has moved goes to the log.

    is_built: whether the engine runs already, with all features that are built into it. Raises SeamMoved for a vital feature.
    """
    findings = [each for each in findings if each.feature.at_start and each.feature.device in (None, device)]
    for each in findings:
        log.error("vLLM has moved: %s. Without %s: %s.", each, each.feature.name, each.feature.without)
    vital = [each for each in findings if each.feature.is_vital or (is_built and each.feature.is_built_in)]
    if vital:
        raise SeamMoved("vLLM has moved, and nothing can be served: " + "; ".join(map(str, vital)))
    return frozenset(each.feature for each in findings)


def without(config: Config, off: Iterable[Feature]) -> Config:
    """Return the settings with which these features are off."""
    changes = {name: value for feature in off for name, value in feature.settings or ()}
    return msgspec.structs.replace(config, **changes) if changes else config
