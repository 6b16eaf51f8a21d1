"""Adapters that lie on a model hub."""

from __future__ import annotations

from collections.abc import Iterable

from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.settings.lora_modules import is_of_hub


def with_fetched(adapters: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return (name, folder) of (name, place) of adapters: those of a hub are fetched into its cache. This blocks.

    Raises:
        InvalidRequest: the hub does not give one.
    """
    return tuple((name, _fetched(place) if is_of_hub(place) else place) for name, place in adapters)


def _fetched(repository: str) -> str:
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(repository))
    except Exception as error:
        why = " ".join(str(error).split())
        raise InvalidRequest(
            f"lora_modules: {repository} is no folder here, and the hub does not give it: {why}"
        ) from error
