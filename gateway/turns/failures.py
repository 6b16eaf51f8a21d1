"""Errors of the bridge, and of work that comes while it is not ready, as clients may see them."""

from __future__ import annotations

from engine_bridge.adapters.errors import RegistryFailed
from engine_bridge.protocol.errors import (
    ASLEEP,
    BridgeError,
    EngineUnavailable,
    InternalFailure,
    InvalidRequest,
    TooBusy,
)
from gateway.errors import KINDS, GatewayError


def from_bridge(error: BridgeError) -> GatewayError:
    """Return the error of the bridge as a client may see it."""
    if isinstance(error, EngineUnavailable | InvalidRequest):
        code = error.code if error.code in KINDS else "bad_request"
        return GatewayError(code, str(error), param=getattr(error, "param", None))
    if isinstance(error, TooBusy):
        return GatewayError("rate_limited", str(error), retry_after_s=error.retry_after_s)
    if isinstance(error, RegistryFailed):
        return GatewayError("storage_failed", str(error), retryable=True)
    return GatewayError("internal" if isinstance(error, InternalFailure) else "bad_request", str(error))


def unavailable(state: str, stage: str) -> GatewayError:
    """Return the error for work that comes while the node is not ready."""
    if state == "starting":
        return GatewayError("starting", f"The engine is starting ({stage}). Try again in a few seconds.")
    if state in ("draining", "closed"):
        return GatewayError("draining", "The server is going down. Try again in a moment.")
    if state == "asleep":
        return GatewayError("asleep", ASLEEP)
    if state == "rebuilding":
        return GatewayError(
            "engine_failed", "The engine failed and is being rebuilt. Try again in a few seconds."
        )
    return GatewayError(
        "engine_failed", "The engine could not be started. The server's log says why.", retryable=False
    )
