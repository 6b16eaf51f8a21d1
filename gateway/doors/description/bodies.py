"""Bodies of replies that the gateway makes of dictionaries, as structs that describe them in the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from engine_bridge.policy.kv.hints import KvAction, Outcome
from engine_bridge.protocol.figures import AdapterStats, LaneStats, LengthErrors, RequestState, WaitReason
from engine_bridge.protocol.node import AdapterInfo, AdvisoryState
from gateway.recognition.runs import AgentRun
from gateway.sessions import SessionSummary


class ErrorInfo(Struct, frozen=True, kw_only=True):
    """The failure. `code`: a word of docs/protocol.md, "Error codes". `param`: the field at fault, if there is one."""

    message: str
    type: str
    param: str | None
    code: str


class Error(Struct, frozen=True):
    """An error as the OpenAI API shapes it."""

    error: ErrorInfo


class AnthropicErrorInfo(Struct, frozen=True):
    """The failure, for clients of the Anthropic API."""

    type: str
    message: str


class AnthropicError(Struct, frozen=True):
    """An error as the Anthropic API shapes it."""

    type: Literal["error"]
    error: AnthropicErrorInfo


class ChatBatch(Struct, kw_only=True):
    """Several conversations for one call. Other fields are those of a chat completion, without `stream`, `tools` and `n`."""

    model: str | None = None
    messages: list[list[dict[str, Any]]]


class Invocation(Struct, kw_only=True):
    """The body of a chat completion, which has `messages`, or of a text completion, which has `prompt`."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: Any = None


class Versions(Struct, frozen=True, kw_only=True):
    """The versions in use. `version`: vLLM's, null if it is not installed on the gateway's machine."""

    version: str | None
    overture: str


class ServerLoad(Struct, frozen=True, kw_only=True):
    """Number of requests that run or wait, of all keys."""

    server_load: int


class Slept(Struct, frozen=True, kw_only=True):
    """The reply to putting the engine to sleep, in vLLM's form. `level`: 1, at which weights are kept in host memory."""

    status: Literal["sleeping"]
    level: int


class Woken(Struct, frozen=True, kw_only=True):
    """The reply to waking the engine up, in vLLM's form."""

    status: Literal["awake"]


class IsSleeping(Struct, frozen=True, kw_only=True):
    """Whether the engine sleeps, in vLLM's form."""

    is_sleeping: bool


class ResponseDeleted(Struct, frozen=True, kw_only=True):
    """The reply to deleting a response, in the form of OpenAI's API."""

    id: str
    object: Literal["response.deleted"]
    deleted: bool


class Conversation(Struct, frozen=True, kw_only=True):
    """A conversation in the form of OpenAI's API."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, Any]


class ConversationDeleted(Struct, frozen=True, kw_only=True):
    """The reply to deleting a conversation, in the form of OpenAI's API."""

    id: str
    object: Literal["conversation.deleted"]
    deleted: bool


class InputItems(Struct, frozen=True, kw_only=True):
    """A page of the input of a response, or of a conversation. last_id: give it as `after` to get the next page."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None


class SessionPage(Struct, frozen=True, kw_only=True):
    """A page of a list.

    `next`: give it as `before` to get the next page; null on the last page. `pinned`: on the first page of all sessions the pinned ones, the
    latest pin first, whether or not `sessions` has them.
    """

    sessions: list[SessionSummary]
    next: str | None
    pinned: list[SessionSummary]


class ChatModel(Struct, frozen=True, kw_only=True):
    """A model that a chat may name: the base model or an adapter with its rank."""

    id: str
    adapter: bool
    rank: int | UnsetType | None = UNSET


class ChatModels(Struct, frozen=True):
    """The models that a chat may name, the base model first."""

    models: list[ChatModel]


class AdvisoryStanding(Struct, frozen=True, kw_only=True):
    """An advisory and its state. The counts are present once the engine has looked for the session's KV."""

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


class KvHintStanding(Struct, frozen=True, kw_only=True):
    """A hint of KV and what was granted of it. `scope`: a session's KV is kept and moved as a whole."""

    id: str
    object: Literal["kv_hint"]
    action: KvAction
    session_id: str | None
    outcome: Outcome | Literal["unknown", "refused"]
    granted_ttl_s: float
    expires_in_s: float
    scope: Literal["session"]
    advisories: list[str]


class KvHintBatch(Struct, frozen=True):
    """The hints of an envelope. num_ignored: actions that are malformed or unknown."""

    message_id: str
    hints: list[KvHintStanding]
    num_ignored: int


class AdapterList(Struct, frozen=True):
    """The adapters by name, and figures about them; `stats` is null until the engine is up."""

    adapters: list[AdapterInfo]
    stats: AdapterStats | None


class AdapterChanged(Struct, frozen=True):
    """The reply to a change of an adapter: a sentence about the change."""

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
    """Requests that run and wait, and why. Other keys' requests appear in sums only."""

    engine: EngineFigures
    policy: str
    lanes: LaneStats | None
    num_by_reason: dict[WaitReason, int]
    counts: dict[str, int]
    seconds: dict[str, float]
    calls_by_session: dict[str, int]
    length_errors: LengthErrors | None
    runs: list[AgentRun]
    waiting: OwnRequests
    running: OwnRequests


class Alive(Struct, frozen=True):
    """The process answers."""

    status: Literal["ok"]


class Ready(Struct, frozen=True):
    """Requests are taken."""

    status: Literal["ready"]


class NotReady(Struct, frozen=True, kw_only=True):
    """How far the engine has come, or why it will not start. `stage` is a phrase for people."""

    status: str
    stage: str
    elapsed_s: float
    message: str | UnsetType = UNSET
