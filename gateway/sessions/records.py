"""Data that the store takes and returns: sessions, turns, and what begins and ends a turn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, NewType

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engine_bridge.protocol.engine_request import CalledTool, ChatMessage, Picture, Sampling

SessionId = NewType("SessionId", str)
TurnId = NewType("TurnId", str)
TurnStatus = Literal["running", "done", "stopped", "failed"]
Outcome = Literal["new", "retried", "continued", "existing"]
# Where a session was made: in a chat, or by a call of the OpenAI and Anthropic APIs. It becomes `chat` when a person continues it.
Origin = Literal["chat", "api"]


# Chosen: about eight thousand tokens of English. A longer one leaves most models little room for the conversation.
MAX_SYSTEM_PROMPT_CHARS: Final = 32_000
MAX_ANSWER_TOKENS: Final = 1_000_000  # Chosen: more than any model's context holds.

SystemPrompt = Annotated[str, Meta(max_length=MAX_SYSTEM_PROMPT_CHARS)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
MaxTokens = Annotated[int, Meta(ge=1, le=MAX_ANSWER_TOKENS)]
TopP = Annotated[float, Meta(gt=0, le=1)]
# Chosen: what people type into a field; a message may give more.
Stop = Annotated[list[Annotated[str, Meta(min_length=1, max_length=100)]], Meta(max_length=8)]
Seed = Annotated[int, Meta(ge=-(2**53) + 1, le=2**53 - 1)]  # which every client of JSON can say


# Names of MCP servers that a conversation may use, and of tools that may be called there without asking. Chosen: more than an operator names.
ServerNames = Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=32)]
AllowedTools = Annotated[list[Annotated[str, Meta(max_length=200)]], Meta(max_length=64)]
# What becomes of a call: the person is asked, it runs, its tool answered, something went wrong, the person said no, or the answer was stopped
# meanwhile. `missing` is no call: it says why tools of a server are not on offer.
CallState = Literal["asking", "running", "done", "failed", "refused", "stopped", "missing"]


class TurnCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that an answer called, and what came of it.

    Attributes:
        id: differs from that of every other call of the turn.
        server: the MCP server's name; "" where the model called a tool that there is not.
        tool: the tool's name there; "" for `missing`.
        name: the name by which the model called it.
        arguments: a JSON text, as the model wrote it.
        round: counts the answers of the model within the turn; calls of one round were made together.
        at: the number of characters of the answer that stand before the call.
        result: text from anywhere, or a sentence of ours where nothing came.
    """

    id: Annotated[str, Meta(max_length=200)]
    server: Annotated[str, Meta(max_length=64)]
    tool: Annotated[str, Meta(max_length=1000)]
    name: Annotated[str, Meta(max_length=1000)]
    arguments: str
    round: Annotated[int, Meta(ge=0)]
    at: Annotated[int, Meta(ge=0)]
    state: CallState
    result: str = ""


class StoredPicture(msgspec.Struct, frozen=True):
    """A picture that an owner has stored. id: its SHA-256 in hex. width, height: in pixels."""

    id: str
    media_type: str
    width: int
    height: int
    num_bytes: int


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One message and its answer, as docs/protocol.md describes them.

    answer: "" while the turn runs and if it failed without text. reasoning: what the model thought before the answer; no later turn reads it.
    versions: the ids of all turns that follow the same turn as this one, including its own, oldest first. pictures: of the message.
    calls: the tools that the answer called, in order.
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
    pictures: list[StoredPicture] = []
    calls: list[TurnCall] = []

    @property
    def can_go_on(self) -> bool:
        """Whether there is an answer that was cut: by its limit of tokens, or by its reader. One that ends with a call has no text to go on from."""
        return (
            len(self.answer) > (self.calls[-1].at if self.calls else 0)
            and self.status in ("done", "stopped")
            and self.finish_reason in ("length", "stopped")
        )

    def is_of(self, content: str, pictures: Sequence[str]) -> bool:
        """Return whether this is the turn of a message with this text and the pictures of these ids."""
        return self.content == content and [each.id for each in self.pictures] == list(pictures)

    @property
    def is_history(self) -> bool:
        """Whether the prompts of later turns include this one."""
        return self.status in ("done", "stopped") or (
            self.status == "failed" and bool(self.answer or self.calls)
        )


class SessionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A session's own settings; None leaves a setting to the server.

    max_tokens: of one answer. tools: names of the MCP servers whose tools its answers may use. allowed_tools: tools that are used without asking.
    """

    system_prompt: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    top_p: float | None = None
    stop: list[str] | None = None
    seed: int | None = None
    tools: list[str] | None = None
    allowed_tools: list[str] | None = None

    def sampling(self, asked: Sampling) -> Sampling:
        """Return how to sample an answer: as the message asks, and where it does not say, as the session does."""
        names = ("temperature", "max_tokens", "top_p", "stop", "seed")
        missing = {name: getattr(self, name) for name in names if getattr(asked, name) is None}
        return msgspec.structs.replace(asked, **missing)


class SettingsPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes to a session's settings. A missing field stays as it is; null leaves the setting to the server again."""

    system_prompt: SystemPrompt | None | UnsetType = UNSET
    temperature: Temperature | None | UnsetType = UNSET
    max_tokens: MaxTokens | None | UnsetType = UNSET
    top_p: TopP | None | UnsetType = UNSET
    stop: Stop | None | UnsetType = UNSET
    seed: Seed | None | UnsetType = UNSET
    tools: ServerNames | None | UnsetType = UNSET
    allowed_tools: AllowedTools | None | UnsetType = UNSET


NO_CHANGES: Final = SettingsPatch()


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation with the turns that are shown, oldest first."""

    id: SessionId
    title: str | None
    adapter: str | None
    created_at: float
    updated_at: float
    turns: list[Turn]
    settings: SessionSettings = SessionSettings()


class Excerpt(msgspec.Struct, frozen=True):
    """A passage of a turn on one line. `before` and `after` begin or end with "…" where the text continues."""

    before: str
    match: str
    after: str


class SessionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation in a list.

    num_turns: number of turns shown. found_in: the turn that holds the searched text, a shown one if possible, else one of another version; None
    if the title holds it, and without a search. excerpt: the words around the text in that turn.
    """

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
    folder: str | None = None


class BeginResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `begin_turn`.

    outcome: for `new`, `retried` (the turn had failed before) and `continued` (its cut answer is continued) the caller must run the turn and call
    `finish_turn`; for `existing` the turn runs or is over already, and nothing was written. history: the turns that the prompt begins with, oldest
    first; empty for `existing`. title: the session's, perhaps just made. history_token_ids: what `finish_turn` was given for the last turn of the
    history that has ids; b"" if none has. answer_token_ids: of a continued turn, all ids up to the end of its answer; b"" if not known.
    """

    turn: Turn
    outcome: Outcome
    title: str | None
    history: list[Turn]
    history_token_ids: bytes = b""
    answer_token_ids: bytes = b""
    settings: SessionSettings = SessionSettings()

    @property
    def is_new(self) -> bool:
        """Whether the caller must run the turn."""
        return self.outcome != "existing"


class FinishResult(NamedTuple):
    """The result of `finish_turn`. title: the session's present title; it may have been changed while the turn ran."""

    turn: Turn
    title: str | None


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A Responses call as its clients may ask for it again.

    reply: the response object. items: the call's `input`, a list. Both are JSON. previous: its `previous_response_id`.
    """

    reply: bytes
    items: bytes
    previous: str | None


class ResponseHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The turns up to and including that of a response, and the token ids that the engine has seen of them."""

    session_id: SessionId
    turns: list[tuple[Turn, StoredResponse | None]]
    token_ids: bytes


class NextPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of a session's next prompt: its system prompt, the turns shown, and the packed token ids that the engine has seen of them.

    is_answering: one of its turns is being answered, so the next prompt begins with more than that.
    """

    history: list[Turn]
    token_ids: bytes
    is_answering: bool = False
    settings: SessionSettings = SessionSettings()


class NewMessage(NamedTuple):
    """A message to store. now: seconds since the epoch; all else as for `SessionStore.begin_turn`."""

    id: str
    content: str
    adapter: str | None | UnsetType
    after: str | None | UnsetType
    now: float
    pictures: tuple[str, ...] = ()
    continues: bool = False


class End(NamedTuple):
    """How a turn ended, in the order of the columns of `finish`. usage, timings, calls: JSON."""

    answer: str
    status: TurnStatus
    finish_reason: str | None
    usage: str | None
    timings: str | None
    reasoning: str = ""
    calls: str | None = None


# Of a prompt without pictures.
NO_PICTURES: Final[Mapping[str, Picture]] = {}


def question_of(turn: Turn, pictures: Mapping[str, Picture]) -> ChatMessage:
    """Return a turn's message as a prompt has it. pictures: as in `messages_of`."""
    shown = tuple(pictures[each.id] for each in turn.pictures if each.id in pictures)
    return ChatMessage("user", turn.content, shown)


class PictureRoom(NamedTuple):
    """The room for pictures in a prompt: pixels and bytes of all pictures together."""

    max_pixels: float = math.inf
    max_bytes: float = math.inf


ANY_PICTURES: Final = PictureRoom()


def with_latest_pictures(turns: Sequence[Turn], max_images: int, room: PictureRoom) -> list[Turn]:
    """Return turns, oldest first, with the latest of their pictures: at most `max_images`, as far as there is room.

    Pictures of the last turn are not measured here: a new question is read whole or refused.
    """
    kept: list[Turn] = []
    num_pixels = num_bytes = 0
    for turn in reversed(turns):
        shown: list[StoredPicture] = []
        for each in reversed(turn.pictures):
            num_pixels += each.width * each.height
            num_bytes += each.num_bytes
            is_over = bool(kept) and (num_pixels > room.max_pixels or num_bytes > room.max_bytes)
            max_images = 0 if is_over else max_images
            if max_images > 0:
                shown.insert(0, each)
            max_images -= 1
        kept.append(
            turn if len(shown) == len(turn.pictures) else msgspec.structs.replace(turn, pictures=shown)
        )
    return kept[::-1]


def messages_of(
    history: Iterable[Turn],
    settings: SessionSettings,
    pictures: Mapping[str, Picture] = NO_PICTURES,
    *,
    keeps_calls: bool = True,
) -> list[ChatMessage]:
    """Return the messages that a prompt of the session begins with: its system prompt, if it has one, and its turns.

    Args:
        history: the turns.
        settings: the session's.
        pictures: the prompt's pictures by id; other pictures of the turns are left out.
        keeps_calls: whether the model knows tools; without, answers that called some have their text alone.
    """
    messages = [] if settings.system_prompt is None else [ChatMessage("system", settings.system_prompt)]
    for turn in history:
        messages.append(question_of(turn, pictures))
        messages += answer_messages(turn.answer, turn.calls if keeps_calls else ())
    return messages


# Stands between the texts of two rounds of one answer.
BETWEEN_ROUNDS: Final = "\n\n"


def answer_messages(answer: str, calls: Iterable[TurnCall]) -> list[ChatMessage]:
    """Return an answer as a prompt has it: the text of each round with its calls, the calls' results, and the text behind the last call."""
    messages: list[ChatMessage] = []
    start = 0
    made = [call for call in calls if call.state != "missing"]
    for _, together in itertools.groupby(made, key=lambda call: call.round):
        group = list(together)
        asked = tuple(CalledTool(call.id, call.name, call.arguments) for call in group)
        messages.append(ChatMessage("assistant", _text_of_round(answer, start, group[0].at), calls=asked))
        messages += [ChatMessage("tool", call.result, call_id=call.id) for call in group]
        start = group[0].at
    if rest := _text_of_round(answer, start, len(answer)):
        messages.append(ChatMessage("assistant", rest))
    return messages


def _text_of_round(answer: str, start: int, end: int) -> str:
    text = answer[start:end]
    return text.removeprefix(BETWEEN_ROUNDS) if start else text
