"""Which adapter a client means."""

from __future__ import annotations

from msgspec import UnsetType

from engine_bridge.protocol.api_errors import unknown_model
from engine_bridge.protocol.node import Node
from gateway.errors import GatewayError


def known_adapter(node: Node, adapter: str | None | UnsetType) -> str | None | UnsetType:
    """The base model's own names and "" are None. Raises `unknown_model`."""
    if adapter is None or isinstance(adapter, UnsetType):
        return adapter
    if adapter in ("", *node.model_names):
        return None
    names = [info.name for info in node.adapters()]
    if adapter not in names:
        raise GatewayError(
            "unknown_model", unknown_model(adapter, [*node.model_names, *names]), param="adapter"
        )
    return adapter
