"""What a model's class says of the model, which vLLM wants to know before it builds an engine.

vLLM asks a process that it starts for this, which imports all of vLLM again: 9 s of a core. It does so to leave CUDA alone, and writes what it found
into a folder of the user's, which a container loses. On a CPU there is no CUDA, and the engine that is built next, in this process, imports the class
anyway. Source: vLLM 0.32, `model_executor/models/registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def install() -> None:
    """Have vLLM look at models' classes in this process."""
    from engine_bridge.driver.vllm_api import registry

    registry._run_in_subprocess = _run_here


def _run_here(fn: Callable[[], Any]) -> Any:
    return fn()
