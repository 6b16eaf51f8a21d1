"""Where the parts of vLLM's in-process engine lie."""

from __future__ import annotations

from typing import Any


def scheduler_of(engine: Any) -> Any:
    return engine.engine_core.engine_core.scheduler


def kv_caches_of(engine: Any) -> list[Any]:
    """An in-process engine's KV cache, a tensor per layer."""
    worker = engine.engine_core.engine_core.model_executor.driver_worker
    return list(getattr(worker, "worker", worker).model_runner.kv_caches)
