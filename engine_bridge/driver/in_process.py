"""Where the parts of vLLM's in-process engine lie, and what its model is called."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtiers.weights import folder_revision

log = logging.getLogger(__name__)

_OF_THIS_PROCESS = uuid.uuid4().hex
_before_loading: dict[str, str] = {}
"""By the path of a model, the digest of its files before an engine began to load them."""


def scheduler_of(engine: Any) -> Any:
    """The scheduler inside a vLLM engine that runs in this process."""
    return engine.engine_core.engine_core.scheduler


def runner_of(engine: Any) -> Any:
    """The model runner of a vLLM engine that runs in this process."""
    worker = engine.engine_core.engine_core.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner


def kv_caches_of(engine: Any) -> list[Any]:
    """An in-process engine's KV cache, a tensor per layer."""
    return list(runner_of(engine).kv_caches)


def reuses_kv(vllm_config: Any) -> bool:
    """Whether a built engine has a prefix cache: for some models, on some devices, vLLM switches it off, whatever it was told."""
    return bool(vllm_config.cache_config.enable_prefix_caching)


def know_weights(model: str, memory: Path | None, report: Callable[[str], None]) -> None:
    """Read the model's files where that has not been done before, so that `revision_of` does not take long and knows what was there before an engine
    loads them. report: hears how far that has come.
    """
    path = Path(model)
    if path.exists():
        _before_loading[model] = folder_revision(path, memory, report)


def revision_of(model: Any) -> str:
    """A digest of the files of a folder, or of the file that a model is; of a model of a hub the commit that it was loaded from.

    Where nothing tells which weights were loaded (they were streamed from elsewhere, or a hub's cache names no commit) they are taken for this
    process's own: what it keeps is of no use to another. So they are for one engine where the files are not those that were there before it loaded
    them: it may have the old ones, the new ones, or some of each.
    """
    weights = model.model_weights or model.model
    path = Path(weights)
    if path.exists():
        revision = folder_revision(path)
        if _before_loading.get(weights, revision) == revision:
            return revision
        log.warning(
            "the model's files have changed since they were loaded: what is kept of this engine is for no other"
        )
        return f"{revision}, changed since it was loaded: {uuid.uuid4().hex}"
    commit = _commit_of(model) if weights == model.model else None
    return f"{weights}@{commit or f'unknown-{_OF_THIS_PROCESS}'}"


def _commit_of(model: Any) -> str | None:
    """Of a model of a hub: as its configuration says, else by the folder of the hub's cache that holds it. Mistral's own form says nothing of it."""
    from huggingface_hub import try_to_load_from_cache

    if commit := getattr(model.hf_config, "_commit_hash", None):
        return str(commit)
    with contextlib.suppress(ValueError):  # no name of a hub's
        for name in ("params.json", "config.json"):
            path = try_to_load_from_cache(model.model, name, revision=model.revision)
            if isinstance(path, str):
                return Path(path).parent.name
    return None
