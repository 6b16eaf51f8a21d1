"""Bodies of replies that the gateway makes of dictionaries, as structs: they describe them in the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from engine_bridge.protocol.node import (
    AdapterInfo,
    AdapterStats,
    AdvisoryState,
    LaneStats,
    LengthErrors,
    RequestState,
    WaitReason,
)
from gateway.sessions import SessionSummary


class ErrorInfo(Struct, frozen=True, kw_only=True):
    """What went wrong. `code`: a word of docs/protocol.md, "Error codes". `param`: the field at fault, where there is one."""

    message: str
    type: str
    param: str | None
    code: str


class Error(Struct, frozen=True):
    """An error as the OpenAI API shapes it."""

    error: ErrorInfo


class AnthropicErrorInfo(Struct, frozen=True):
    """What went wrong, for clients of the Anthropic API."""

    type: str
    message: str


class AnthropicError(Struct, frozen=True):
    """An error as the Anthropic API shapes it."""

    type: Literal["error"]
    error: AnthropicErrorInfo


class Versions(Struct, frozen=True, kw_only=True):
    """`version`: vLLM's, null where it is not installed on the gateway's machine."""

    version: str | None
    overture: str


class ServerLoad(Struct, frozen=True, kw_only=True):
    """Requests that run or wait, of everybody."""

    server_load: int


class ResponseDeleted(Struct, frozen=True, kw_only=True):
    """What OpenAI's API says of a deleted response."""

    id: str
    object: Literal["response.deleted"]
    deleted: bool


class InputItems(Struct, frozen=True, kw_only=True):
    """A page of the input of a response. last_id: where the next page begins, to be given as `after`."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None


class SessionPage(Struct, frozen=True, kw_only=True):
    """A page of a list. `next`: where the next one begins, to be given as `before`; null on the last page. `pinned`: on the first
    page of all sessions those that are pinned, the one that was pinned last first, whether or not `sessions` has them."""

    sessions: list[SessionSummary]
    next: str | None
    pinned: list[SessionSummary]


class ChatModel(Struct, frozen=True, kw_only=True):
    """A model that a chat may name: the base model or an adapter with its rank."""

    id: str
    adapter: bool
    rank: int | UnsetType | None = UNSET


class ChatModels(Struct, frozen=True):
    """All of them, the base model first."""

    models: list[ChatModel]


class AdvisoryStanding(Struct, frozen=True, kw_only=True):
    """An advisory and how it stands. The counts are there once the engine has looked for the session's KV."""

    id: str
    object: Literal["advisory"]
    session_id: str
    model: str | None
    state: Literal["accepted"] | AdvisoryState
    is_merged: bool
    expires_in_s: float
    tier: Literal["device", "host"] | UnsetType | None = UNSET
    num_tokens: int | UnsetType = UNSET
    device_tokens: int | UnsetType = UNSET
    host_bytes: int | UnsetType = UNSET
    disk_bytes: int | UnsetType = UNSET
    peer_bytes: int | UnsetType = UNSET
    adapter_bytes: int | UnsetType = UNSET
    lead_ms: float | UnsetType | None = UNSET
    late_ms: float | UnsetType | None = UNSET


class AdvisoryBatch(Struct, frozen=True):
    """The advisories of an envelope."""

    message_id: str
    advisories: list[AdvisoryStanding]


class AdapterList(Struct, frozen=True):
    """All adapters by name, and figures about them; `stats` is null until the engine is up."""

    adapters: list[AdapterInfo]
    stats: AdapterStats | None


class AdapterChanged(Struct, frozen=True):
    """A sentence that says what was done."""

    status: str


class EngineFigures(Struct, frozen=True, kw_only=True):
    """The engine between two steps."""

    state: str
    num_running: int
    num_waiting: int
    num_kv_blocks: int
    num_free_kv_blocks: int
    block_size: int
    num_steps: int
    num_rebuilds: int


class OwnRequests(Struct, frozen=True):
    """Requests of the caller's key: how many there are, and the first of them."""

    total: int
    requests: list[RequestState]


class EngineStanding(Struct, frozen=True, kw_only=True):
    """What runs, what waits and why. Of others' requests there are sums only."""

    engine: EngineFigures
    policy: str
    lanes: LaneStats | None
    num_by_reason: dict[WaitReason, int]
    counts: dict[str, int]
    seconds: dict[str, float]
    length_errors: LengthErrors | None
    waiting: OwnRequests
    running: OwnRequests


class Alive(Struct, frozen=True):
    """The process answers."""

    status: Literal["ok"]


class Ready(Struct, frozen=True):
    """Requests are taken."""

    status: Literal["ready"]


class NotReady(Struct, frozen=True, kw_only=True):
    """How far the engine has come, or why it will not come. `stage` is a phrase for people."""

    status: str
    stage: str
    elapsed_s: float
    message: str | UnsetType = UNSET
