"""The one way to vLLM: every name of vLLM's that this project uses, given by name, and checked.

`from engine_bridge.driver.vllm_api import Scheduler` imports vLLM's module when the name is asked for, not before: until then no part of vLLM or
torch is loaded. So code that must wait until the engine's environment is set imports inside a function.

Where each name comes from, how we use it and which features depend on it is written down in `inventory.py`. `check` finds the names that have moved;
`start` turns off the features that can be left out. `overture doctor` prints the result.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from engine_bridge.driver.vllm_api.inventory import ALL
from engine_bridge.protocol.errors import SeamMoved


def __getattr__(name: str) -> Any:
    """Return a class, function or value of the inventory, or a module of vLLM's in which we replace something. Raises SeamMoved."""
    place = _places().get(name)
    if place is None:
        raise AttributeError(f"{name!r} is not in the inventory of vLLM's names ({__name__}.inventory)")
    module_name, member = place
    try:
        module = importlib.import_module(module_name)
        return getattr(module, member) if member else module
    except (AttributeError, ModuleNotFoundError) as error:
        raise SeamMoved(f"vLLM has no {module_name}.{member}: {error}") from error


@cache
def _places() -> dict[str, tuple[str, str]]:
    """Return the module of each name that can be had here, and its name there; for a module, the second is empty."""
    found = {}
    for owner in ALL:
        if owner.class_name:
            found[owner.class_name] = owner.module, owner.class_name
            continue
        found |= {use.name: (owner.module, use.name) for use in owner.uses if not use.name.startswith("__")}
        if any(use.how == "replace" for use in owner.uses):
            found[owner.module.rpartition(".")[2]] = owner.module, ""
    return found


def vllm_version() -> str:
    """Return the version of the imported vLLM, as it names itself."""
    version: str = importlib.import_module("vllm").__version__
    return version
