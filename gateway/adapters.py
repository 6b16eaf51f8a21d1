"""Which adapter a client means."""

from __future__ import annotations

from msgspec import UnsetType

from engine_bridge.node import Node
from gateway.errors import GatewayError


def known_adapter(node: Node, adapter: str | None | UnsetType) -> str | None | UnsetType:
    """The base model's own name and "" are None. Raises `unknown_model`."""
    if adapter is None or isinstance(adapter, UnsetType):
        return adapter
    if adapter in ("", node.model_name):
        return None
    if adapter not in {info.name for info in node.adapters()}:
        raise GatewayError(
            "unknown_model", f"There is no adapter named {adapter[:100]!r} here.", param="adapter"
        )
    return adapter
