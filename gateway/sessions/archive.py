"""A conversation as a file: all of its versions as JSON, or what is shown of it as Markdown. Pure."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Sequence
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from engine_bridge.protocol.node import Timings, Usage
from gateway.errors import GatewayError
from gateway.sessions.records import SettingsPatch, TurnCall, TurnId
from gateway.sessions.text import is_id
from gateway.tools.results import arguments_of

FORMAT: Final = "overture-conversation"
VERSION: Final = 1
MAX_TURNS: Final = (
    10_000  # Chosen: a person writes fewer in a year; storing an archive of this size takes a second.
)
MAX_PICTURES: Final = (
    MAX_TURNS  # Of all turns together. Chosen: to look at so many and to store them takes a second, too.
)
MAX_CALLS: Final = (
    1000  # Of one turn. Chosen: far above what the rounds of an answer make, and a page can still show them.
)
MAX_SAID_CHARS: Final = (
    300  # Chosen: of a fault in the words of msgspec, which repeat what the file has there.
)
MAX_VALUES: Final = 40 * MAX_TURNS  # A turn with all its figures has 26 as JSON.

_T = TypeVar("_T")

Word = Annotated[str, Meta(max_length=200)]


class ArchivedPicture(Struct, frozen=True):
    """A picture of a message. data: the file's bytes, in base64."""

    media_type: Word
    data: bytes


class ArchivedTurn(Struct, frozen=True, kw_only=True):
    """A message with its answer.

    parent: the id of the turn that it follows, which stands before it in the archive; None for a first turn. is_chosen: whether this version is
    shown among the turns with the same parent.
    """

    id: TurnId
    parent: TurnId | None = None
    is_chosen: bool = True
    content: str
    answer: str = ""
    reasoning: str = ""
    status: Literal["done", "stopped", "failed"] = "done"
    adapter: Word | None = None
    finish_reason: Word | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    created_at: float = 0.0
    pictures: list[ArchivedPicture] = []
    calls: list[TurnCall] = []


class Archive(Struct, frozen=True, kw_only=True):
    """A conversation as it is exported and imported. Times are seconds since the epoch."""

    format: Literal["overture-conversation"] = FORMAT
    version: int = VERSION
    title: Word | None = None
    adapter: Word | None = None
    created_at: float = 0.0
    updated_at: float = 0.0
    settings: SettingsPatch = SettingsPatch()
    turns: list[ArchivedTurn]


class OpenAIMessage(Struct, frozen=True):
    """A message of OpenAI's chat format, as far as it is text."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class OpenAIMessages(Struct, frozen=True, kw_only=True):
    """A conversation in OpenAI's chat format, which other programs export."""

    messages: list[OpenAIMessage]
    title: Word | None = None


def read_archive(body: object, max_pictures: int = MAX_PICTURES) -> Archive:
    """Check a client's file and return it as an archive.

    Args:
        body: the file's JSON value.
        max_pictures: of one message.

    Raises:
        GatewayError: `bad_request`, with the place of the fault.
    """
    if not isinstance(body, dict):
        raise _refused("It is not a JSON object.")
    if "messages" in body and "turns" not in body:
        return _from_messages(_converted(body, OpenAIMessages))
    if body.get("format") != FORMAT:
        raise _refused(f'It has neither "format": "{FORMAT}" nor "messages".')
    version = body.get("version")
    if version != VERSION:
        raise _refused(
            f"It is of version {_shortened(repr(version))}, and this server reads version {VERSION}."
        )
    archive = _converted(body, Archive)
    _check_tree(archive.turns)
    _check_pictures(archive.turns, max_pictures)
    turns = [_with_ended_calls(turn, f"turns[{number}]") for number, turn in enumerate(archive.turns)]
    return msgspec.structs.replace(archive, turns=turns)


def _converted(body: object, kind: type[_T]) -> _T:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise _refused(f"{_shortened(str(error))}.") from error


def _shortened(said: str) -> str:
    """Return a text without its middle if it is long: its end says where the fault is."""
    half = MAX_SAID_CHARS // 2
    return said if len(said) <= MAX_SAID_CHARS else f"{said[:half]}…{said[-half:]}"


def _refused(why: str) -> GatewayError:
    return GatewayError("bad_request", f"This file cannot be imported. {why}")


def _check_tree(turns: Sequence[ArchivedTurn]) -> None:
    """Check that each turn follows an earlier one and that exactly one version of each message is shown. So there is no circle."""
    if len(turns) > MAX_TURNS:
        raise _refused(f"It has {len(turns)} turns, and {MAX_TURNS} are the most.")
    seen: set[str] = set()
    chosen: dict[str | None, bool] = {}
    for number, turn in enumerate(turns):
        where = f"turns[{number}]"
        if not is_id(turn.id):
            raise _refused(f"The id of {where} is none.")
        if turn.id in seen:
            raise _refused(f"The id of {where} stands there twice.")
        if turn.parent is not None and turn.parent not in seen:
            raise _refused(f"The parent of {where} does not stand before it.")
        if turn.is_chosen and chosen.get(turn.parent):
            raise _refused(f"{where} is chosen, and so is another version of it.")
        chosen[turn.parent] = chosen.get(turn.parent, False) or turn.is_chosen
        seen.add(turn.id)
    if not all(chosen.values()):
        raise _refused("Of some message no version is chosen.")


def _check_pictures(turns: Sequence[ArchivedTurn], most: int) -> None:
    for number, turn in enumerate(turns):
        if len(turn.pictures) > most:
            raise _refused(f"turns[{number}] has {len(turn.pictures)} pictures, and {most} are the most.")
    num_pictures = sum(len(turn.pictures) for turn in turns)
    if num_pictures > MAX_PICTURES:
        raise _refused(f"It has {num_pictures} pictures, and {MAX_PICTURES} are the most.")


def _with_ended_calls(turn: ArchivedTurn, where: str) -> ArchivedTurn:
    """Check the calls of a turn, and return it with calls that are over: nobody is asked about them any more."""
    if not turn.calls:
        return turn
    if len(turn.calls) > MAX_CALLS:
        raise _refused(f"{where} has {len(turn.calls)} calls, and {MAX_CALLS} are the most.")
    if len({call.id for call in turn.calls}) < len(turn.calls):
        raise _refused(f"Two calls of {where} have the same id.")
    # Chat templates and vLLM read the arguments of earlier calls as JSON.
    if any(call.state != "missing" and arguments_of(call.arguments) is None for call in turn.calls):
        raise _refused(f"The arguments of a call of {where} are no JSON object.")
    ended = [
        msgspec.structs.replace(call, state="stopped") if call.state in ("asking", "running") else call
        for call in turn.calls
    ]
    return msgspec.structs.replace(turn, calls=ended)


def _from_messages(given: OpenAIMessages) -> Archive:
    system = [each.content for each in given.messages if each.role in ("system", "developer")]
    turns: list[ArchivedTurn] = []
    is_open = False
    for number, message in enumerate(given.messages):
        last = turns[-1] if turns else None
        if message.role == "user":
            turns.append(_turn_of(message.content, last))
            is_open = True
        elif message.role == "assistant":
            if not is_open or last is None:
                raise _refused(f"messages[{number}] answers no message of a user.")
            turns[-1] = msgspec.structs.replace(last, answer=message.content, status="done")
            is_open = False
    if len(turns) > MAX_TURNS:
        raise _refused(f"It has {len(turns)} turns, and {MAX_TURNS} are the most.")
    prompt = "\n\n".join(system)
    settings = _converted({"system_prompt": prompt} if prompt else {}, SettingsPatch)
    return Archive(title=given.title, settings=settings, turns=turns)


def _turn_of(content: str, last: ArchivedTurn | None) -> ArchivedTurn:
    number = 0 if last is None else int(last.id) + 1
    parent = None if last is None else last.id
    # A turn without an answer counts as stopped, so that later turns include its message.
    return ArchivedTurn(id=TurnId(str(number)), parent=parent, content=content, status="stopped")


# -- for people --------------------------------------------------------------------------------------------------------


def shown(turns: Sequence[ArchivedTurn]) -> list[ArchivedTurn]:
    """Return the turns that a page shows, in order."""
    found: list[ArchivedTurn] = []
    for turn in turns:
        if turn.is_chosen and turn.parent == (found[-1].id if found else None):
            found.append(turn)
    return found


def as_markdown(archive: Archive, model: str) -> str:
    """Render the shown turns of a conversation as Markdown for people. model: the name to show where no adapter answered."""
    day = time.strftime("%Y-%m-%d", time.gmtime(archive.created_at))
    parts = [
        f"# {_one_line(archive.title or 'New chat')}",
        f"*{day} · {_one_line(archive.adapter or model)}*",
    ]
    if isinstance(archive.settings.system_prompt, str):
        parts += ["## System prompt", archive.settings.system_prompt]
    for turn in shown(archive.turns):
        parts += [
            "## You",
            *map(_as_image, turn.pictures),
            turn.content,
            f"## {_one_line(turn.adapter or model)}",
        ]
        if turn.reasoning:
            parts.append(
                f"<details>\n<summary>Reasoning</summary>\n\n{_without_tags(turn.reasoning)}\n\n</details>"
            )
        parts += [*map(_as_call, turn.calls), turn.answer or "*(no answer)*"]
        if turn.status == "stopped" and turn.answer:
            parts.append("*(stopped)*")
    return "\n\n".join(parts) + "\n"


def _as_image(picture: ArchivedPicture) -> str:
    return (
        f"![A picture](data:{_one_line(picture.media_type)};base64,{base64.b64encode(picture.data).decode()})"
    )


def _as_call(call: TurnCall) -> str:
    """Render a call folded away, its texts as they were, and nothing in them as Markdown."""
    said = f"{call.server}: {call.tool}" if call.tool else f"{call.server}: tools"
    texts = [_fenced(call.arguments)] if call.tool else []
    named = _escaped(_one_line(f"{said} ({call.state})"))
    whole = "\n\n".join([*texts, _fenced(call.result)])
    return f"<details>\n<summary>{named}</summary>\n\n{whole}\n\n</details>"


def _fenced(text: str) -> str:
    """Return a text in a fence that is longer than any in it."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`{3,}", text))])
    return f"{fence}\n{text}\n{fence}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _without_tags(text: str) -> str:
    """Return the text without tags that would end the block around it."""
    return re.sub(r"</?details", lambda found: found[0].replace("<", "&lt;"), text, flags=re.IGNORECASE)


def file_name(title: str | None, suffix: str) -> str:
    """Return a file name that every system takes: letters, digits and dashes of the title."""
    words = re.sub(r"[^\w]+", "-", title or "", flags=re.UNICODE).strip("-_")[:60].strip("-_")
    return f"{words or 'conversation'}.{suffix}"
