"""The node protocol: what the gateway asks of whatever runs a model, and the data that crosses.

Everything here is plain data (msgspec structs, strings, numbers, bytes), so a node may live on a thread of this process or on another
machine. This module stands on the ground: it imports neither asyncio, torch nor vllm.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Literal, NewType, Protocol

from msgspec import Meta, Struct

from engine_bridge.protocol.node_facts import NodeFacts
from engine_bridge.protocol.request_context import NOBODY, RequestContext
from kvtiers.stats import TierStats

RequestId = NewType("RequestId", str)

FinishReason = Literal["stop", "length", "stopped"]
# How a prompt was made: `first` question of a conversation, ids of the history `kept` whole or `cut` where the chat template went another
# way, everything `rendered` anew, ids `given` by the caller.
PromptOrigin = Literal["first", "kept", "cut", "rendered", "given"]
NodeState = Literal["starting", "ready", "rebuilding", "draining", "failed", "closed"]
# How Anthropic's API names errors, by HTTP status. Source: its documentation of errors.
ANTHROPIC_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
Api = Literal[
    "chat",
    "completions",
    "responses",
    "messages",
    "count_tokens",
    "tokenize",
    "detokenize",
    "tokenizer_info",
]
# Calls that generate nothing: they belong to no conversation and leave nothing behind.
COUNTING_APIS: frozenset[Api] = frozenset(("count_tokens", "tokenize", "detokenize", "tokenizer_info"))


TOKEN_ID_BYTES = 4


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32: what is stored and what crosses between processes."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_token_ids(packed: bytes) -> tuple[int, ...]:
    """The token ids in bytes that `pack_token_ids` made."""
    return struct.unpack(f"<{len(packed) // TOKEN_ID_BYTES}I", packed)


_TOKEN_IDS_EVENT = b": token ids "


def token_ids_event(packed: bytes) -> bytes:
    """A server-sent comment with what `JsonReply.token_ids` holds."""
    return _TOKEN_IDS_EVENT + base64.b64encode(packed) + b"\n\n"


def token_ids_of(event: bytes) -> bytes | None:
    """What `token_ids_event` was given; None for any other event."""
    return base64.b64decode(event[len(_TOKEN_IDS_EVENT) :]) if event.startswith(_TOKEN_IDS_EVENT) else None


class ChatMessage(Struct, frozen=True):
    """One message of a conversation, before the chat template."""

    role: str
    content: str


class Sampling(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to choose tokens. What is left out comes from the model's generation config, then from vLLM's defaults."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=16)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    ignore_eos: bool | None = None


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """One answer to compute.

    Either `messages` (the node renders its model's chat template) or `prompt_token_ids` is given. `history_token_ids`: the ids of the
    conversation before the last message, packed (`pack_token_ids`): advice, which never changes the text that the model reads.
    """

    request_id: RequestId
    context: RequestContext = NOBODY
    messages: tuple[ChatMessage, ...] = ()
    prompt_token_ids: tuple[int, ...] | None = None
    sampling: Sampling = Sampling()
    history_token_ids: bytes = b""


class Usage(Struct, frozen=True):
    """Token counts of one request. `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class KvSources(Struct, frozen=True):
    """Where the KV of the prompt came from, in tokens; together the prompt. peer: fetched from another node for this request."""

    device: int
    host: int
    disk: int
    recomputed: int
    peer: int = 0


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


class Prompt(Struct, frozen=True):
    """What the engine was asked: packed ids, how they were made, and how many of the history's ids they begin with."""

    token_ids: bytes
    origin: PromptOrigin
    num_kept_tokens: int = 0


class Delta(Struct, frozen=True):
    """More of an answer. The last one carries `finish_reason`, `usage`, `timings`, and `prompt` unless it was stopped before there was one.

    reasoning: what the model thinks before its answer, as far as a parser knows it for that; it is not in `text`.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    prompt: Prompt | None = None
    reasoning: str = ""


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


class AdapterStats(Struct, frozen=True, kw_only=True):
    """A node's adapters.

    `counts`: since the start, by what happened: `found:PLACE` (requests, by where their adapter was), `loads:SOURCE` and `load_bytes:SOURCE`
    into host memory, `slot_fills`, `slot_bytes`, `cache_bytes`, `evicted:TIER[:REASON]`, `failed`, `prefetched`, `copied_ahead`,
    `worker_deltas`, `laid_out_ahead`, `laid_out_in_step`.

    `seconds`: of the engine's time inside `step`s and `between` them, and on the loader's thread, `load:SOURCE` and `layout`.

    `failed`: by name, why an adapter of the folder, or one named at the start, is not served as its files are, and whether it is tried again.
    """

    num_adapters: int
    num_by_place: dict[str, int]
    host_bytes: int
    host_capacity_bytes: int
    cached_bytes: int
    num_waiting: int
    counts: dict[str, int]
    seconds: dict[str, float]
    failed: dict[str, str] = {}

    @property
    def num_failed(self) -> int:
        return len(self.failed)


class Advisory(Struct, frozen=True, kw_only=True):
    """Word that a request of this session will come. Source: SYMPHONY §3.1, plus the adapter.

    `expected_arrival_s` is a lower bound from now, or None when nobody can tell (a person typing). `priority`: lower first, as of requests; None is
    0, as any other. `is_ordered`: it comes before the requests of this tenant's ordered advisories that are sent later. `probability`: that the
    request comes, as far as the gateway has learned. `token_ids`: what its prompt will begin with, packed; without them a node goes by what the
    session's last request left. `tenant`, `kv_from`: as in `RequestContext`.
    """

    advisory_id: str
    session_id: str
    expected_arrival_s: float | None = None
    priority: int | None = None
    is_ordered: bool = False
    adapter: str | None = None
    probability: float = 1.0
    token_ids: bytes = b""
    tenant: str = ""
    kv_from: str = ""


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


class NodeStats(Struct, frozen=True, kw_only=True):
    """A snapshot for dashboards and routing; cheap to take."""

    state: NodeState
    model: str
    max_model_len: int
    num_running: int
    num_waiting: int
    num_kv_blocks: int
    num_free_kv_blocks: int
    block_size: int
    num_steps: int
    num_rebuilds: int
    kv_tiers: TierStats | None = None


# Why a request waits. By the policy: its lane's quota is used up, blocks or memory for its adapter are lacking, another stands before it, or all
# that may run do. Before the policy considers it: its grammar or its adapter is not there yet, or no step began since it came. It was to start
# and could not: its KV is on its way, no slot for its adapter was free, the step was full. `paused`: urgent requests decode, which would be slower
# with it. `queued`: vLLM's own queue, which does not say more.
WaitReason = Literal[
    "lane_quota",
    "no_blocks",
    "adapter_memory",
    "behind_head",
    "no_slot",
    "grammar_compiling",
    "adapter_on_its_way",
    "just_came",
    "kv_on_its_way",
    "adapter_slots",
    "step_full",
    "paused",
    "queued",
]


class LaneStats(Struct, frozen=True, kw_only=True):
    """Lanes in order of size. boundaries: between neighbouring lanes, one fewer than lanes. used_tokens: by who runs, borrowed ones with them."""

    boundaries: tuple[float, ...]
    num_waiting: tuple[int, ...]
    quota_tokens: tuple[int, ...]
    used_tokens: tuple[int, ...]


class LengthErrors(Struct, frozen=True, kw_only=True):
    """How far finished answers were from their predicted median, in tokens. num_within: by how many tokens at most, so many answers; cumulative."""

    num_answers: int
    sum_tokens: int
    num_within_p90: int
    num_within: dict[int, int]


class TokenizerStats(Struct, frozen=True):
    """What all tenants' rendering and tokenising came to since the start, and what waits for it now."""

    num_jobs: int
    seconds: float
    num_waiting: int


class SchedulingStats(Struct, frozen=True, kw_only=True):
    """Who starts next, in figures, and how full the device is.

    `counts`: since the engine's start, `admitted`, `bypassed`, `squashed`, `preempted[:KIND]`, `refits`, `decisions`, `log_bytes`, and
    `log_cut:REASON` where a decision log ended early. `seconds`: of the engine thread, deciding (`decide`) and all about it (`step`). lanes,
    length_errors: None where there are none. num_answer_tokens: generated since the engine's start. block_size: tokens of a KV block.
    """

    policy: str
    num_running: int
    num_waiting: int
    num_by_reason: dict[WaitReason, int]
    lanes: LaneStats | None
    counts: dict[str, int]
    seconds: dict[str, float]
    length_errors: LengthErrors | None
    num_answer_tokens: int = 0
    num_kv_blocks: int = 0
    num_free_kv_blocks: int = 0
    block_size: int = 0


class RequestState(Struct, frozen=True, kw_only=True):
    """A request that waits or runs.

    request_id: as its client knows it. waited_s: until it started, or so far. ran_s: None while it waits, or where nobody knows. size_tokens: what
    it is charged, prompt, predicted answer and adapter; without a policy of ours its tokens so far. defer_reason: None while it runs.
    """

    request_id: str
    priority: int
    lane: int | None = None
    waited_s: float | None = None
    ran_s: float | None = None
    size_tokens: int
    num_output_tokens: int
    defer_reason: WaitReason | None = None
    times_bypassed: int = 0
    times_squashed: int = 0
    times_preempted: int = 0
    is_bypasser: bool = False


class EngineState(Struct, frozen=True, kw_only=True):
    """An engine between two steps. waiting, running: the first of one tenant's; num_waiting, num_running: all of that tenant's."""

    engine: NodeStats
    scheduling: SchedulingStats
    waiting: list[RequestState]
    running: list[RequestState]
    num_waiting: int
    num_running: int


class Progress(Struct, frozen=True):
    """How far a node has come on its way to `ready`. `stage` is a phrase for people."""

    state: NodeState
    stage: str
    elapsed_s: float
    error: str | None = None


class Dropped(Struct, frozen=True):
    """How many of each were left out of a call."""

    tools: int = 0
    messages: int = 0

    def __bool__(self) -> bool:
        return bool(self.tools or self.messages)

    def __str__(self) -> str:
        """For headers and logs: `tools=36, messages=4`."""
        return ", ".join(f"{name}={num}" for name in self.__struct_fields__ if (num := getattr(self, name)))

    @classmethod
    def parse(cls, text: str) -> Dropped:
        """What `str` was made of."""
        pairs = (part.split("=") for part in text.split(", ") if part)
        return cls(**{name: int(num) for name, num in pairs})


class JsonReply(Struct, frozen=True):
    """A whole answer of an OpenAI- or Anthropic-shaped call: HTTP status and a JSON body. token_ids: of a session's call, all that the engine read
    and wrote, packed; b"" where that is not known. dropped: what was left out of the call so that its prompt fits."""

    status: int
    body: bytes
    token_ids: bytes = b""
    dropped: Dropped = Dropped()


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

    The last event of a session's call may be one of `token_ids_event`, a comment that is meant for the gateway and not for clients.
    """

    events: AsyncIterator[bytes]


class GrammarStats(Struct, frozen=True):
    """Grammars of structured output that were checked before the engine saw them.

    num_checked: by a helper process. num_refused: of these. num_deaths: that ended a helper process, by a crash or by
    their time. seconds: of checking.
    """

    num_checked: int
    num_refused: int
    num_deaths: int
    seconds: float


class Node(Protocol):
    """A place where a model runs. All methods are called from one event loop.

    Methods raise `engine_bridge.protocol.errors.BridgeError` subclasses; anything else is a bug.
    """

    @property
    def progress(self) -> Progress: ...

    @property
    def model_name(self) -> str:
        """The name of the base model."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt and answer together; 0 until the engine is up."""
        ...

    @property
    def num_steps(self) -> int:
        """Of the engine, since the start of the process."""
        ...

    @property
    def num_rebuilds(self) -> int: ...

    async def start(self) -> None:
        """Begin to bring the engine up; returns when it is ready or raises what stopped it."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Stream one answer. Closing the iterator aborts the request within one engine step."""
        ...

    async def serve(
        self,
        api: Api,
        body: object,
        headers: Mapping[str, str],
        context: RequestContext = NOBODY,
    ) -> JsonReply | SseReply:
        """Answer one OpenAI- or Anthropic-shaped call from its JSON value. Errors come as a `JsonReply` in that API's shape.

        context: what the body says of priority and session counts for nothing beside it; the adapter is the one that the body names.
        """
        ...

    async def cancel(self, request_id: RequestId) -> bool:
        """Stop a running `generate`; its stream ends with finish_reason `stopped`. False if it is not running here."""
        ...

    async def advise(self, advisory: Advisory, on_change: Callable[[AdvisoryReport], None]) -> None:
        """Prepare for a request to come; it takes the place of the session's last advisory.

        on_change: called on the event loop with each new state, the last time with one of ADVISORY_ENDS. Raises NotSupported where the node acts
        on no advisories.
        """
        ...

    def retract(self, advisory_id: str, *, is_expired: bool) -> None:
        """End an advisory, because it was taken back or its time is over. Nothing happens if it is over already."""
        ...

    async def prefill(self, request: GenerateRequest) -> int:
        """Compute the KV of a prompt that may come, when nothing else runs; the last message is a draft that goes on.

        Returns the tokens whose KV is there now. Cancel the task to stop; what is computed stays. No output is made, nothing is kept of the text.
        """
        ...

    def kv_tiers(self) -> TierStats | None:
        """Figures of the KV tiers behind the device; None where there are none (yet). From any thread."""
        ...

    def end_session(self, tenant: str, session_id: str) -> None:
        """No request will come any more that begins as this tenant's session did: the KV of it may go first. tenant: as in `RequestContext`."""
        ...

    def adapters(self) -> list[AdapterInfo]: ...

    async def models(self) -> JsonReply:
        """The body of `/v1/models`."""
        ...

    async def api_schemas(self) -> ApiSchemas:
        """What the calls take and give. The same each time."""
        ...

    async def engine_metrics(self) -> str:
        """vLLM's own figures as Prometheus' text; of several nodes with the label `node`."""
        ...

    async def load_adapter(self, body: object) -> JsonReply:
        """Load an adapter from a JSON value of vLLM's `/v1/load_lora_adapter` shape."""
        ...

    async def unload_adapter(self, body: object) -> JsonReply:
        """Takes an adapter off the list. Source: vLLM's `POST /v1/unload_lora_adapter`, whose body and replies it has."""

    async def pin_adapter(self, name: str, is_pinned: bool) -> AdapterInfo | None:
        """Keep an adapter in memory, or no longer. None for one that is not served."""
        ...

    def adapter_stats(self) -> AdapterStats | None:
        """Figures of the adapters; None where there are none (yet). From any thread."""
        ...

    def tokenizer_stats(self) -> TokenizerStats | None:
        """What rendering and tokenising came to; None until the engine is up. From any thread."""
        ...

    def grammar_stats(self) -> GrammarStats | None:
        """Figures of the check of grammars; None until the engine is up. From any thread."""
        ...

    def scheduling_stats(self) -> SchedulingStats | None:
        """Figures of who starts next; None until the engine is up. From any thread."""
        ...

    async def engine_state(self, tenant: str, limit: int) -> EngineState:
        """The engine as it is, with at most so many waiting and so many running requests of a tenant ("" as in `RequestContext`)."""
        ...

    def facts(self) -> NodeFacts | None:
        """What routing reckons with, under an empty name: who asked knows which node this is. None until the engine is up. Cheap; from any thread."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests and wait for the running ones. True if all ended in time."""
        ...

    async def close(self) -> None: ...
