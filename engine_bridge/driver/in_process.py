"""Accessors to the parts of vLLM's in-process engine, and the digest of the weights that its model has."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtiers.weights import folder_revision

if TYPE_CHECKING:
    from engine_bridge.driver.ranks.calls import Ranks

log = logging.getLogger(__name__)

_OF_THIS_PROCESS = uuid.uuid4().hex
_before_loading: dict[str, str] = {}
"""The digest of a model's files as they were before an engine began to load them, by the model's path."""


def scheduler_of(engine: Any) -> Any:
    """Return the scheduler inside a vLLM engine that runs in this process."""
    return engine.engine_core.engine_core.scheduler


def ranks_of(engine: Any) -> Ranks | None:
    """Return the ranks of a built engine; None where its worker is in this process."""
    ranks: Ranks | None = getattr(engine, "ranks", None)
    return ranks


def runner_of(engine: Any) -> Any:
    """Return the model runner of a vLLM engine that runs in this process."""
    worker = engine.engine_core.engine_core.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner


def kv_caches_of(engine: Any) -> list[Any]:
    """Return an in-process engine's KV cache: see `kv_caches_in`."""
    return kv_caches_in(runner_of(engine))


def kv_caches_in(runner: Any) -> list[Any]:
    """Return a model runner's KV cache in the pool's blocks: a tensor for each layer, or for the layers of several groups that share its memory."""
    from engine_bridge.driver.memory.block_copy import distinct, in_blocks, whole_pages

    config = runner.kv_cache_config
    # All groups have blocks of the same bytes where layers of several share memory.
    pages = {group.kv_cache_spec.page_size_bytes for group in config.kv_cache_groups}
    page_bytes = pages.pop() if len(pages) == 1 else 0
    return distinct(whole_pages(in_blocks(each, config.num_blocks), page_bytes) for each in runner.kv_caches)


def reuses_kv(vllm_config: Any) -> bool:
    """Return whether a built engine has a prefix cache: for some models, on some devices, vLLM switches it off, whatever it was told."""
    return bool(vllm_config.cache_config.enable_prefix_caching)


def know_weights(model: str, memory: Path | None, report: Callable[[str], None]) -> None:
    """Read the model's files, unless that has been done before.

    Afterwards `revision_of` is quick, and knows which files there were before an engine loaded them. model: a path; a name of a hub's model is
    ignored. memory: the file in which digests are remembered; None: none are. report: called with texts that say how far the reading has come.
    """
    path = Path(model)
    if path.exists():
        _before_loading[model] = folder_revision(path, memory, report)


def revision_of(model: Any) -> str:
    """Return a digest of a model's files (a folder's or a single file's), or the commit that a hub's model was loaded from.

    Weights of unknown origin (streamed from elsewhere, or from a hub's cache that names no commit) count as this process's own, so other processes do
    not use the KV that is kept for them. If the files have changed since before an engine loaded them, the engine may have the old files, the new
    ones or some of each: then the revision is valid for this one engine only.
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
    """Return the commit of a hub's model, None where nothing names it.

    Its configuration names the commit, else the folder of the hub's cache does. Mistral's own format names none.
    """
    from huggingface_hub import try_to_load_from_cache

    if commit := getattr(model.hf_config, "_commit_hash", None):
        return str(commit)
    with contextlib.suppress(ValueError):  # the model is not the name of a hub's model
        for name in ("params.json", "config.json"):
            path = try_to_load_from_cache(model.model, name, revision=model.revision)
            if isinstance(path, str):
                return Path(path).parent.name
    return None
