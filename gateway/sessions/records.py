"""What the store gives and takes: sessions, turns, and what is known when a turn begins and ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, NamedTuple, NewType

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engine_bridge.protocol.node import ChatMessage, Sampling
from gateway.sessions.excerpt import Excerpt

SessionId = NewType("SessionId", str)
TurnId = NewType("TurnId", str)
TurnStatus = Literal["running", "done", "stopped", "failed"]
Outcome = Literal["new", "retried", "existing"]
# Who made a session: a person in a chat, or a call of the OpenAI and Anthropic APIs. One that a person goes on with is theirs.
Origin = Literal["chat", "api"]


# Chosen: about eight thousand tokens of English. A longer one leaves most models little room for the conversation.
MAX_SYSTEM_PROMPT_CHARS: Final = 32_000
MAX_ANSWER_TOKENS: Final = 1_000_000  # Chosen: more than any model's context holds.

SystemPrompt = Annotated[str, Meta(max_length=MAX_SYSTEM_PROMPT_CHARS)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
MaxTokens = Annotated[int, Meta(ge=1, le=MAX_ANSWER_TOKENS)]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One message and its answer, as docs/protocol.md gives it. `answer` is "" while the turn runs and when it failed without text.

    reasoning: what the model thought before the answer; no later turn reads it. versions: the ids of all turns that follow the same turn as this
    one, its own among them, oldest first.
    """

    id: TurnId
    content: str
    answer: str
    status: TurnStatus
    adapter: str | None
    finish_reason: str | None
    usage: dict[str, Any] | None
    timings: dict[str, Any] | None
    created_at: float
    reasoning: str = ""
    versions: list[TurnId] = []

    @property
    def is_history(self) -> bool:
        """Whether later turns are answered in the light of this one."""
        return self.status in ("done", "stopped") or (self.status == "failed" and self.answer != "")


class SessionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a session sets; None leaves it to the server. `max_tokens`: the most tokens of an answer."""

    system_prompt: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None

    def sampling(self, asked: Sampling) -> Sampling:
        """How to sample an answer: as the message asks, and where it does not say, as the session does."""
        return msgspec.structs.replace(
            asked,
            temperature=self.temperature if asked.temperature is None else asked.temperature,
            max_tokens=self.max_tokens if asked.max_tokens is None else asked.max_tokens,
        )


class SettingsPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to change of a session's settings: what is left out stays, null leaves it to the server again."""

    system_prompt: SystemPrompt | None | UnsetType = UNSET
    temperature: Temperature | None | UnsetType = UNSET
    max_tokens: MaxTokens | None | UnsetType = UNSET


NO_CHANGES: Final = SettingsPatch()


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation with the turns that are shown of it, oldest first."""

    id: SessionId
    title: str | None
    adapter: str | None
    created_at: float
    updated_at: float
    turns: list[Turn]
    settings: SessionSettings = SessionSettings()


class SessionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation in a list. num_turns: how many are shown of it. found_in: the turn that holds the text that was searched for; one that
    is shown, if there is any, else one of another version. None for a title that holds it, and where nothing was searched for. excerpt: the
    words around it there."""

    id: SessionId
    title: str | None
    adapter: str | None
    created_at: float
    updated_at: float
    num_turns: int
    found_in: TurnId | None = None
    excerpt: Excerpt | None = None
    origin: Origin = "chat"
    is_pinned: bool = False


class BeginResult(msgspec.Struct, frozen=True, kw_only=True):
    """What ``begin_turn`` did.

    outcome: ``new`` and ``retried`` (it had failed before): the caller must run the turn and call ``finish_turn``. ``existing``: it runs
    already or is over, nothing was written. history: the turns to answer in the light of, oldest first; empty for ``existing``.
    title: the session's, perhaps just made. history_token_ids: what ``finish_turn`` was given for the last turn of the history that has
    ids, b"" if none has.
    """

    turn: Turn
    outcome: Outcome
    title: str | None
    history: list[Turn]
    history_token_ids: bytes = b""
    settings: SessionSettings = SessionSettings()

    @property
    def is_new(self) -> bool:
        """Whether the caller must run the turn."""
        return self.outcome != "existing"


class FinishResult(NamedTuple):
    """What ``finish_turn`` left. title: the session's, as it is now; it may have been renamed while the turn ran."""

    turn: Turn
    title: str | None


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A Responses call as its clients may ask for it again. reply: the response object; items: what the call gave as `input`, a list; both JSON.
    previous: its `previous_response_id`."""

    reply: bytes
    items: bytes
    previous: str | None


class ResponseHistory(msgspec.Struct, frozen=True, kw_only=True):
    """What led to a response: the turns that its own follows, its own last, and the token ids of what the engine has seen of them."""

    session_id: SessionId
    turns: list[tuple[Turn, StoredResponse | None]]
    token_ids: bytes


class NextPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """What a session's next prompt begins with: its system prompt, the turns that are shown, and the token ids of all that the engine has seen of
    them (packed). is_answering: one of its turns is being answered, so the next prompt begins with more than that."""

    history: list[Turn]
    token_ids: bytes
    is_answering: bool = False
    settings: SessionSettings = SessionSettings()


class NewMessage(NamedTuple):
    """A message that is to be stored; `adapter` and `after` as for ``SessionStore.begin_turn``."""

    id: str
    content: str
    adapter: str | None | UnsetType
    after: str | None | UnsetType
    now: float


class End(NamedTuple):
    """How a turn ended, in the order of the columns of `finish`; `usage` and `timings` are JSON."""

    answer: str
    status: TurnStatus
    finish_reason: str | None
    usage: str | None
    timings: str | None
    reasoning: str = ""


def messages_of(history: Iterable[Turn], settings: SessionSettings) -> list[ChatMessage]:
    """What a prompt of the session begins with: its system prompt, if it has one, and its turns."""
    messages = [] if settings.system_prompt is None else [ChatMessage("system", settings.system_prompt)]
    for turn in history:
        messages.append(ChatMessage("user", turn.content))
        if turn.answer:
            messages.append(ChatMessage("assistant", turn.answer))
    return messages
