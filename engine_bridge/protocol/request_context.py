"""Who asks, and what: the one description of a request that the gateway makes and everybody behind it hands on as it is."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from engine_bridge.protocol.asked import NOTHING_ASKED, Asked


class RequestContext(Struct, frozen=True, kw_only=True):
    """What the gateway knows of a request beside its text. What the engine's side finds out stands beside it, never in it.

    tenant: whose KV the request may reuse and leave behind; "" where everybody shares. session_id: "" for a request that belongs to no session.
    adapter: its name; "" for the base model. weight: the tenant's share against other tenants'. priority: lower first; a client's, checked.
    asked: what its text says of the answer's length; the question itself only where a user's own predictor reads it. kv_from: another node's
    address (host:port) that may hold KV of this session; "" for none. Only a router sets it.

    history_token_ids: of an API call of a session, the ids of the conversation so far, packed: advice, as in `GenerateRequest`. The node takes them
    out before it hands the context on.
    """

    tenant: str = ""
    session_id: str = ""
    adapter: str = ""
    weight: float = 1.0
    priority: int = 0
    asked: Asked = NOTHING_ASKED
    kv_from: str = ""
    history_token_ids: bytes = b""


NOBODY = RequestContext()


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """Of a call's headers the request id alone: nodes need no keys, and vLLM would also take priority, rank and session from headers."""
    # Bytes that are no UTF-8 come as lone surrogates, which no frame and no reply can hold.
    request_id = headers.get("X-Request-Id", "").encode("utf-8", "replace").decode()
    return {"X-Request-Id": request_id} if request_id else {}
