"""Where the parts of vLLM's in-process engine lie, and what its model is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtiers.keys import folder_revision


def scheduler_of(engine: Any) -> Any:
    """The scheduler inside a vLLM engine that runs in this process."""
    return engine.engine_core.engine_core.scheduler


def kv_caches_of(engine: Any) -> list[Any]:
    """An in-process engine's KV cache, a tensor per layer."""
    worker = engine.engine_core.engine_core.model_executor.driver_worker
    return list(getattr(worker, "worker", worker).model_runner.kv_caches)


def revision_of(model: Any) -> str:
    """A digest of a folder's files; of a model of a hub the commit that it was loaded from, or the wanted one where the hub's cache does not tell."""
    folder = Path(model.model)
    if folder.is_dir():
        return folder_revision(folder)
    return str(getattr(model.hf_config, "_commit_hash", None) or model.revision or "unknown")
