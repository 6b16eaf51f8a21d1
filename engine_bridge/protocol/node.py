"""The node protocol: what the gateway asks of whatever runs a model, and the data that crosses.

Everything here is plain data (msgspec structs, strings, numbers, bytes), so a node may live on a thread of this process or on another
machine. This module stands on the ground: it imports neither asyncio, torch nor vllm.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec
from msgspec import Struct

from engine_bridge.protocol.engine_request import ANONYMOUS, CalledTool, EngineRequest, RequestId
from engine_bridge.protocol.figures import EngineState, NodeFigures, Progress

FinishReason = Literal["stop", "length", "stopped"]
# How a prompt was made: `first` question of a conversation, ids of the history `kept` whole or `cut` where the chat template went another
# way, everything `rendered` anew, ids `given` by the caller.
PromptOrigin = Literal["first", "kept", "cut", "rendered", "given"]
Api = Literal[
    "chat",
    "completions",
    "responses",
    "messages",
    "count_tokens",
    "input_tokens",
    "tokenize",
    "detokenize",
    "tokenizer_info",
    "embeddings",
    "rerank",
    "score",
]
# Calls that generate nothing: they belong to no conversation and leave nothing behind.
COUNTING_APIS: frozenset[Api] = frozenset(
    ("count_tokens", "input_tokens", "tokenize", "detokenize", "tokenizer_info")
)
# Calls that models beside the chat model answer.
POOLING_APIS: frozenset[Api] = frozenset(("embeddings", "rerank", "score"))

TOKEN_ID_BYTES = 4


# Behind the ids of a prompt with pictures stand its pictures, the number of uint32 that these take, and this number, which is no token's.
_HAS_PICTURES = 0xFFFFFFFF


class SeenPicture(Struct, frozen=True, array_like=True):
    """A picture in a prompt. Its KV depends on its content, which its token ids do not tell.

    offset, num_tokens: where it stands. identifier: of its content, by which block hashes tell pictures apart.
    """

    offset: int
    num_tokens: int
    identifier: str


def pack_token_ids(token_ids: Sequence[int], pictures: Sequence[SeenPicture] = ()) -> bytes:
    """Return token ids as little-endian uint32, as they are stored and cross between processes, and behind them the pictures of their prompt."""
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    if not pictures:
        return packed
    described = msgspec.json.encode(pictures)
    described += b" " * (-len(described) % TOKEN_ID_BYTES)
    return packed + described + struct.pack("<2I", len(described) // TOKEN_ID_BYTES, _HAS_PICTURES)


def followed_by(packed: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the ids and pictures in bytes that `pack_token_ids` made, followed by these ids."""
    if pictures := seen_pictures(packed):
        return pack_token_ids([*unpack_token_ids(packed), *token_ids], pictures)
    return packed + pack_token_ids(token_ids)


def unpack_token_ids(packed: bytes) -> tuple[int, ...]:
    """Return the token ids in bytes that `pack_token_ids` made."""
    num_ids = num_token_ids(packed)
    return struct.unpack_from(f"<{num_ids}I", packed)


def num_token_ids(packed: bytes) -> int:
    """Return the number of token ids in bytes that `pack_token_ids` made."""
    num_words = len(packed) // TOKEN_ID_BYTES
    if num_words < 2:
        return num_words
    num_described, last = struct.unpack_from("<2I", packed, len(packed) - 2 * TOKEN_ID_BYTES)
    return num_words - 2 - num_described if last == _HAS_PICTURES else num_words


def seen_pictures(packed: bytes) -> list[SeenPicture]:
    """Return the pictures of a prompt in bytes that `pack_token_ids` made."""
    start = num_token_ids(packed) * TOKEN_ID_BYTES
    described = packed[start : -2 * TOKEN_ID_BYTES] if start < len(packed) else b"[]"
    return msgspec.json.decode(described, type=list[SeenPicture])


_TOKEN_IDS_EVENT = b": token ids "


def token_ids_event(packed: bytes) -> bytes:
    """Return a server-sent comment with `JsonReply.token_ids`."""
    return _TOKEN_IDS_EVENT + base64.b64encode(packed) + b"\n\n"


def token_ids_of(event: bytes) -> bytes | None:
    """Return the token ids of a comment that `token_ids_event` made; None for any other event."""
    return base64.b64decode(event[len(_TOKEN_IDS_EVENT) :]) if event.startswith(_TOKEN_IDS_EVENT) else None


_FIGURES_EVENT = b": figures "


def is_for_gateway(event: bytes) -> bool:
    """Return whether an event of a stream is one of the node's comments to the gateway, which no client gets."""
    return event.startswith((_TOKEN_IDS_EVENT, _FIGURES_EVENT))


class Usage(Struct, frozen=True, omit_defaults=True):
    """Token counts of one request. `cached_tokens` of the prompt were not computed again.

    left_out_messages: messages at the beginning of the conversation that were left out so that the prompt fits.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    left_out_messages: int = 0


class KvSources(Struct, frozen=True):
    """Tokens of the prompt by the place that their KV came from; together the prompt. peer: fetched from another node for this request."""

    device: int
    host: int
    disk: int
    recomputed: int
    peer: int = 0


class CallFigures(Struct, frozen=True):
    """The cost of an API call's request: the sources of its prompt's KV, and its answer's tokens. Only the first prompt and answer count."""

    kv: KvSources
    num_answer_tokens: int = 0


def figures_event(figures: CallFigures) -> bytes:
    """Return a server-sent comment with `JsonReply.figures`."""
    return _FIGURES_EVENT + msgspec.json.encode(figures) + b"\n\n"


def figures_of(event: bytes) -> CallFigures | None:
    """Return the figures of a comment that `figures_event` made; None for any other event."""
    if not event.startswith(_FIGURES_EVENT):
        return None
    return msgspec.json.decode(event[len(_FIGURES_EVENT) :], type=CallFigures)


class Timings(Struct, frozen=True):
    """Durations of one request on the monotonic clock, in milliseconds.

    `queue_ms`: until the scheduler first took it. `ttft_ms`: until its first token reached the node. `tpot_ms`:
    (e2e − ttft) / (completion tokens − 1), None for fewer than two tokens.
    """

    queue_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float
    kv: KvSources


class Dropped(Struct, frozen=True):
    """How many parts of each kind were left out of a call."""

    tools: int = 0
    messages: int = 0

    def __bool__(self) -> bool:
        return bool(self.tools or self.messages)

    def __str__(self) -> str:
        """Return the numbers for headers and logs: `tools=36, messages=4`."""
        return ", ".join(f"{name}={num}" for name in self.__struct_fields__ if (num := getattr(self, name)))

    @classmethod
    def parse(cls, text: str) -> Dropped:
        """Return the numbers in a text that `str` made."""
        pairs = (part.split("=") for part in text.split(", ") if part)
        return cls(**{name: int(num) for name, num in pairs})


class Prompt(Struct, frozen=True):
    """The prompt that the engine read: packed ids, how they were made, and how many of the history's ids they begin with.

    dropped: the parts of the conversation that were left out so that it fits.
    """

    token_ids: bytes
    origin: PromptOrigin
    num_kept_tokens: int = 0
    dropped: Dropped = Dropped()


class Delta(Struct, frozen=True):
    """More of an answer. The last one carries `finish_reason`, `usage`, `timings`, and `prompt` unless it was stopped before there was one.

    reasoning: what the model thinks before its answer, as far as a parser knows it for that; it is not in `text`. calls: in the last one, the tools
    that the answer calls, of those that the request offered; they are not in `text` either.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    prompt: Prompt | None = None
    reasoning: str = ""
    calls: tuple[CalledTool, ...] = ()


# Where an adapter is, the nearest place of several: in a slot that steps compute with, in host memory, cached in idle KV blocks of the device,
# or on disk only.
AdapterPlace = Literal["slot", "host", "cached", "disk"]


class AdapterInfo(Struct, frozen=True):
    """A LoRA adapter that requests may name.

    `version`: the first digits of its content's hash; times in Unix seconds. Where there are several nodes, `place` is the nearest on any of them,
    `nodes` its place by node, and `other_versions` says which nodes still serve another version under this name.
    """

    name: str
    rank: int | None = None
    num_bytes: int = 0
    target_modules: tuple[str, ...] = ()
    base_model: str | None = None
    version: str = ""
    place: AdapterPlace = "disk"
    is_pinned: bool = False
    num_uses: int = 0
    last_used_at: float | None = None
    nodes: dict[str, AdapterPlace] = {}
    other_versions: dict[str, str] = {}


# An announced request that is no likelier to come than this takes no place from others: neither their KV's in host memory, nor an unused adapter's
# slot, nor that of another program of an agent. Chosen.
LIKELY = 0.5


class Advisory(Struct, frozen=True, kw_only=True):
    """Word that a request of this session will come. Source: SYMPHONY §3.1, plus the adapter.

    `expected_arrival_s` is a lower bound from now, or None where it is not known (a person typing). `priority`: lower first, as of requests; None is
    0, as any other. `is_ordered`: it comes before the requests of this tenant's ordered advisories that are sent later. `probability`: that the
    request comes, as far as the gateway has learned. `token_ids`: what its prompt will begin with, packed; without them a node goes by what the
    session's last request left. `lifetime_s`: for how long it is waited for. `is_pin`: the tenant's pins together have a share of the device, however
    much room there is. `tenant`, `kv_from`: as in `EngineRequest`.
    """

    advisory_id: str
    session_id: str
    expected_arrival_s: float | None = None
    priority: int | None = None
    is_ordered: bool = False
    adapter: str | None = None
    probability: float = 1.0
    token_ids: bytes = b""
    lifetime_s: float = 60.0
    is_pin: bool = False
    tenant: str = ""
    kv_from: str = ""


class SessionHint(Struct, frozen=True, kw_only=True):
    """A hint about the worth of a session's KV from now on.

    Attributes:
        tenant: as in `EngineRequest`.
        adapter: whose KV the device may take first; None for the base model.
        keep_s: for so long host memory prefers it to the tenant's other sessions; 0: no longer.
        is_shared: other sessions begin as it does, and its blocks stay its own while they use them.
        is_idle: the device takes its blocks before any other, except blocks that other sessions of the tenant share.
    """

    session_id: str
    tenant: str = ""
    adapter: str | None = None
    keep_s: float = 0.0
    is_shared: bool = False
    is_idle: bool = False


# `staging`: on its way up; `host`: in host memory, where it waits; `warm`: all that any tier holds is on the device. The others are ends: its
# request came and found all of it (`hit`) or not yet (`late`); none came, or another than was told, after bytes were moved (`wasted`) or
# before (`expired`); it was taken back (`cancelled`); no tier knows the session (`unknown`).
AdvisoryState = Literal["staging", "host", "warm", "hit", "late", "wasted", "expired", "cancelled", "unknown"]
ADVISORY_ENDS: frozenset[AdvisoryState] = frozenset(
    ("hit", "late", "wasted", "expired", "cancelled", "unknown")
)


class AdvisoryReport(Struct, frozen=True, kw_only=True):
    """How an advisory stands.

    `num_tokens`: of the prefix, as far as any tier holds it; `missing_tokens`: what follows and must be computed; `device_tokens`: on the device.
    `host_bytes`: copied from host memory to the device for it; `disk_bytes`, `peer_bytes`: read from disk and from another node by the readings
    that were begun for it, whatever became of them, until its request came; without one, until their ends, for which its own waits. `adapter_bytes`:
    of its adapter, read for it and laid out in a slot. `lead_s`: from the advisory to its request. `late_s`: what moving the rest would have taken,
    as predicted.
    """

    advisory_id: str
    session_id: str
    state: AdvisoryState
    num_tokens: int = 0
    missing_tokens: int = 0
    device_tokens: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    peer_bytes: int = 0
    adapter_bytes: int = 0
    lead_s: float | None = None
    late_s: float | None = None


class JsonReply(Struct, frozen=True):
    """A whole answer of an OpenAI- or Anthropic-shaped call.

    Attributes:
        token_ids: of a session's call, all ids that the engine read and wrote, packed; b"" where they are not known.
        dropped: parts left out of the call so that its prompt fits.
        num_prompt_tokens: of a call for embeddings, the tokens of all inputs.
        figures: of a call that was answered, as far as they are known.
    """

    status: int
    body: bytes
    token_ids: bytes = b""
    dropped: Dropped = Dropped()
    num_prompt_tokens: int = 0
    figures: CallFigures | None = None


# How one schema of an `ApiSchemas` names another: where OpenAPI keeps them.
SCHEMA_REFERENCE = "#/components/schemas/{name}"


class ApiSchemas(Struct, frozen=True):
    """JSON schemas (draft 2020-12) of the calls of `Node.serve` and those beside it.

    requests: by `Api`, `load_adapter` or `unload_adapter`, the name of the body's schema; what only the server sets is not in it. replies: by `Api`,
    `models` or `model`, the name of the schema of a whole reply. components: the schemas by name.
    """

    requests: dict[str, str]
    replies: dict[str, str]
    components: dict[str, object]


class SseReply(Struct, frozen=True):
    """A streamed answer: complete server-sent events as bytes. The caller must exhaust or `aclose()` the iterator.

    The last events may be those of `figures_event` and, of a session's call, of `token_ids_event`: comments to the gateway (`is_for_gateway`).
    """

    events: AsyncIterator[bytes]


# What becomes of running answers.
SleepMode = Literal["abort", "wait"]


class Answers(Protocol):
    """Answers to chat turns and API calls."""

    def generate(self, request: EngineRequest) -> AsyncIterator[Delta]:
        """Stream one answer. Closing the iterator aborts the request within one engine step."""

    async def serve(
        self,
        api: Api,
        body: object,
        headers: Mapping[str, str],
        request: EngineRequest = ANONYMOUS,
    ) -> JsonReply | SseReply:
        """Answer one OpenAI- or Anthropic-shaped call from its JSON value. Errors come as a `JsonReply` in that API's shape.

        headers: only the request id is passed on. request: the caller; the body's own priority and session are ignored. The adapter is the model that
        the body names.
        """

    async def cancel(self, request_id: RequestId) -> bool:
        """Stop a running `generate`; its stream ends with finish_reason `stopped`. Returns False if it is not running here."""

    async def models(self) -> JsonReply:
        """Return the body of `/v1/models`."""

    async def api_schemas(self) -> ApiSchemas:
        """Return what the calls take and give. It is the same each time."""


class Advice(Protocol):
    """Work ahead of requests that may come."""

    async def advise(self, advisory: Advisory, on_change: Callable[[AdvisoryReport], None]) -> None:
        """Prepare for a request to come; the advisory takes the place of the session's last one.

        on_change: called on the event loop with each new state, the last time with one of ADVISORY_ENDS. Raises NotSupported where the node acts on
        no advisories.
        """

    def retract(self, advisory_id: str, *, is_expired: bool) -> None:
        """End an advisory, because it was taken back or its time is over. Does nothing if it is over already."""

    async def prefill(self, request: EngineRequest) -> int:
        """Compute the KV of a prompt that may come, when nothing else runs; the last message is a draft, which may continue.

        Cancel the task to stop; computed KV stays. No output is made, nothing is kept of the text.

        Returns:
            The number of tokens whose KV is there now.
        """

    def hint_session(self, hint: SessionHint) -> None:
        """Note what the KV of a session is worth. It takes the place of an earlier hint; a node without tiers does nothing."""

    def end_session(self, tenant: str, session_id: str) -> None:
        """Note that no request will begin any more as this tenant's session did: the KV of it may go first. tenant: as in `EngineRequest`."""

    async def erase_kv(self, tenant: str) -> int:
        """Overwrite the KV of a tenant whose requests have ended: on the device with all that is free there, in host memory and on disk.

        Returns:
            The number of blocks that were on disk.

        Raises:
            EngineUnavailable: the engine is not up, or a node is away; then KV may be left, and it may be tried again.
            InternalFailure: a file cannot be written.
        """


class Adapters(Protocol):
    """The LoRA adapters that requests may name."""

    def adapters(self) -> list[AdapterInfo]:
        """Return the adapters on offer."""

    async def load_adapter(self, body: object) -> JsonReply:
        """Load an adapter from a JSON value of vLLM's `/v1/load_lora_adapter` shape."""

    async def unload_adapter(self, body: object) -> JsonReply:
        """Take an adapter off the list. Source: vLLM's `POST /v1/unload_lora_adapter`, whose body and replies it has."""

    async def pin_adapter(self, name: str, is_pinned: bool) -> AdapterInfo | None:
        """Keep an adapter in memory, or no longer. Returns None for an adapter that is not served."""


class Figures(Protocol):
    """How a node is doing."""

    @property
    def progress(self) -> Progress:
        """How far the node has come on its way to `ready`."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that requests may use for the base model; replies have the first. Never empty."""

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt and answer together; 0 until the engine is up."""

    @property
    def max_images(self) -> int:
        """The most pictures that the model reads in one prompt; 0 for a model that reads none, and until the engine is up."""

    @property
    def can_use_tools(self) -> bool:
        """Whether turns may offer tools: calls that the model writes can be read, and no tool's result can spell a special token.

        False until the engine is up.
        """

    def figures(self) -> NodeFigures:
        """Return all figures as one snapshot; cheap to take. From any thread."""

    async def engine_state(self, tenant: str, limit: int) -> EngineState:
        """Return the engine as it is, with at most `limit` waiting and `limit` running requests of a tenant ("" as in `EngineRequest`)."""

    async def engine_metrics(self) -> str:
        """Return vLLM's own figures as Prometheus' text; of several nodes with the label `node`."""


class Node(Answers, Advice, Adapters, Figures, Protocol):
    """A place where a model runs. All methods are called from one event loop.

    Methods raise `engine_bridge.protocol.errors.BridgeError` subclasses; anything else is a bug.
    """

    async def start(self) -> None:
        """Begin to bring the engine up; returns when it is ready or raises what stopped it."""

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests and wait for the running ones. Returns True if all ended in time."""

    async def sleep(self, mode: SleepMode, timeout_s: float) -> None:
        """Give up the device's memory until `wake_up`. Does nothing while it sleeps.

        Conversations' KV in host memory and on disk stays; requests are refused meanwhile.

        Args:
            mode: whether running answers end with an error that asks for another try, or are waited for.
            timeout_s: how long to wait until none runs.

        Raises:
            NotSupported: the device, the settings or the kind of node rule it out.
            EngineUnavailable: `busy` where answers still run after that time; the node is awake then.
        """

    async def wake_up(self) -> None:
        """Take the device's memory back, and requests again. Does nothing while it is awake. Raises NotSupported as `sleep` does."""

    async def close(self) -> None:
        """End the engine."""
