"""A request on its way from the gateway to the engine's queue, and what it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NewType

from msgspec import Meta, Struct

from engine_bridge.protocol.asked import NOTHING_ASKED, Asked

RequestId = NewType("RequestId", str)


class Picture(Struct, frozen=True):
    """A picture of a message. media_type: as `image/png`. data: the file's bytes."""

    media_type: str
    data: bytes


class OfferedTool(Struct, frozen=True):
    """A tool that the model may call. parameters: the JSON schema of its arguments."""

    name: str
    description: str
    parameters: dict[str, Any]


class CalledTool(Struct, frozen=True):
    """A call of a tool that the model made. arguments: a JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


class ChatMessage(Struct, frozen=True, omit_defaults=True):
    """One message of a conversation, before the chat template.

    pictures: they stand before its text. calls: of an answer, the tools that it calls. call_id: of a tool's result (role `tool`), the call's id.
    """

    role: str
    content: str
    pictures: tuple[Picture, ...] = ()
    calls: tuple[CalledTool, ...] = ()
    call_id: str = ""


class Sampling(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to choose tokens. Fields that are left out come from the model's generation config, then from vLLM's defaults."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=16)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    ignore_eos: bool | None = None


class LengthGuess(Struct, frozen=True):
    """The predicted tokens of an answer: half of all answers are no longer than p50, nine of ten no longer than p90. source: the data behind it."""

    p50: int
    p90: int
    source: str

    def bound(self, num_done: int) -> int:
        """Return the tokens to expect in total once `num_done` were generated: p50, then p90, then twice `num_done`."""
        if num_done < self.p50:
            return self.p50
        return self.p90 if num_done < self.p90 else 2 * num_done


class EngineRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request from the gateway to the engine's queue: its tenant, its texts, and the facts that the node adds before it is queued.

    An answer of `Node.generate` is made from `messages` (the node renders its model's chat template) or from `prompt_token_ids`. `Node.serve` takes
    the texts from the call's body instead. Length predictors, a user's own among them, are asked with the request as it is queued.

    Attributes:
        request_id: by which the answer can be cancelled; "" for an API call.
        tenant: whose KV the request may reuse and leave behind; "" where all share.
        session_id: "" for a request that belongs to no session.
        adapter: its name; "" for the base model.
        weight: the tenant's share against others'.
        priority: lower first; a client's, checked.
        turn: of a request with tools: `begins` where a person's message or another program asks, `continues` where it brings tools' results; "" for a
            request without tools.
        caller: the session whose program this one works for; "" for none, or where that is not known.
        keeps_ids: whether the gateway stores the ids of an API call's prompt and answer.
        expected_tokens: how long the client expects the answer to be, which is not trusted; None where it does not say.
        goes_on: whether the last message is a cut answer of the model, which is to be continued.
        is_marked: whether the client has marked parts of the prompt to be kept, so that its usage reports them.
        asked: facts about its text from which its answer's length is predicted; the question itself only where a user's own predictor reads it.
        kv_from: another node's address (host:port) that may hold KV of this session; "" for none. Only a router sets it.
        traceparent: the W3C name of the gateway's span that the request belongs to; "" where no trace is kept.
        accepted_s: when the gateway accepted the request, in Unix seconds; 0 where that is not said.
        messages: the conversation up to the question. The node leaves them out of the request that it queues.
        tools: the tools that the model may call. The node leaves them out of the request that it queues.
        prompt_token_ids: the prompt's ids, given in place of messages. The node fills them in where a user's own predictor reads them.
        history_token_ids: the ids of the session before the last message, packed (`pack_token_ids`): advice, which never changes the text that the
            model reads. The node leaves them out of the request that it queues.
        num_prompt_tokens: the node fills in this field and the fields below; tokens of the prompt, cached or not.
        max_tokens: the client's bound of the answer.
        hints: numbers for length predictors, always the same ones in the same order: see `predict/hints.py`.
        client_salt: the client's own salt that keeps its KV apart, before the tenant's and the adapter's were added.
        guess: the length that a user's own predictor returned; None: the scheduler asks the node's predictor.
    """

    request_id: RequestId = RequestId("")
    tenant: str = ""
    session_id: str = ""
    adapter: str = ""
    weight: float = 1.0
    priority: int = 0
    turn: Literal["", "begins", "continues"] = ""
    caller: str = ""
    keeps_ids: bool = False
    expected_tokens: int | None = None
    goes_on: bool = False
    is_marked: bool = False
    asked: Asked = NOTHING_ASKED
    kv_from: str = ""
    traceparent: str = ""
    accepted_s: float = 0.0
    messages: tuple[ChatMessage, ...] = ()
    tools: tuple[OfferedTool, ...] = ()
    prompt_token_ids: Sequence[int] | None = None
    sampling: Sampling = Sampling()
    history_token_ids: bytes = b""
    num_prompt_tokens: int = 0
    max_tokens: int | None = None
    hints: tuple[float, ...] = ()
    rank: int = 0
    client_salt: str | None = None
    guess: LengthGuess | None = None

    @property
    def session(self) -> str:
        """The session's name apart from other tenants' sessions of the same name, so that no tenant learns of another's lengths; "" for none."""
        return session_key(self.tenant, self.session_id)

    @property
    def system(self) -> str:
        """The tenant's system prompt, "" for none. As with sessions, no tenant learns of another's."""
        return f"{self.tenant}/{self.asked.system}" if self.asked.system else ""

    @property
    def template(self) -> str:
        """How the tenant's question begins, under this system prompt; "" for none."""
        return f"{self.tenant}/{self.asked.template}" if self.asked.template else ""

    @property
    def question(self) -> str:
        """The last message's text, 2,048 characters of it."""
        return self.asked.question


def session_key(tenant: str, session_id: str) -> str:
    """Return a session's name apart from other tenants' sessions of the same name; "" for none."""
    return f"{tenant}/{session_id}" if tenant and session_id else session_id


# For a request of which nothing is known.
ANONYMOUS = EngineRequest()


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the request id of a call's headers, alone: nodes need no keys, and vLLM would also take priority, rank and session from headers."""
    # Bytes that are no UTF-8 come as lone surrogates, which no frame and no reply can hold.
    request_id = headers.get("X-Request-Id", "").encode("utf-8", "replace").decode()
    return {"X-Request-Id": request_id} if request_id else {}
