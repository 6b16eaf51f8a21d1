"""Calls as parts of sessions that no client named, and what the node is told of their return."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine_bridge.protocol.node import COUNTING_APIS, Api
from gateway.access.auth import tenant_of
from gateway.advisories.advisories import MAX_TTL_S, Advisories, AdvisoryRequest
from gateway.errors import GatewayError
from gateway.metrics.metrics import Metrics
from gateway.people.usage import num_chars_of
from gateway.recognition.callers import Callers, handed_lines
from gateway.recognition.conversations import Conversation, Conversations
from gateway.recognition.fingerprints import ends_with_results, fingerprint, marks, turn_of
from gateway.recognition.runs import AgentRuns
from gateway.recognition.session_names import caller_name, session_name
from gateway.recognition.tool_pauses import ToolPauses
from gateway.turns.replies import AnswerReader

log = logging.getLogger(__name__)

# The share of conversations that come back after their tools. Source: the same trace as `tool_pauses.PUBLISHED`.
LIKELY_BACK = 0.95
# A conversation that stays away longer than was announced is announced again: for as long as its tools take when they have taken so long already, and
# each time it is half as likely to come back. Chosen: three more times, behind which one in a hundred would.
MAX_ANNOUNCED = 4
# How a session's first call is found; those of stored sessions may be any. Only such a call may begin a helper.
FIRST_CALLS = ("new", "named", "stored")
# Seconds after which the end of an announcement was noted for sure. Chosen.
GRACE_S = 0.1
# Longer bodies are read on another thread: a history of a megabyte takes milliseconds. Chosen.
INLINE_BYTES = 1 << 16
# Conversations that are away with their tools and may still come back; the one away for longest is forgotten first.
MAX_AWAY = 16384


@dataclass(slots=True)
class SessionCall:
    """One call as part of a session.

    Attributes:
        session_id: the session's name for the node.
        model: the adapter that it names; None for the base model.
        conversation: None for a session that is stored, whose client named it.
        caller: the session that it works for, as far as that is known; "" for none.
        is_over: whether its end was noted.
        at_end: what to do then; None for nothing.
    """

    owner: str
    session_id: str
    model: str | None
    conversation: Conversation | None = None
    caller: str = ""
    is_over: bool = False
    at_end: Callable[[], None] | None = None


@dataclass(slots=True, eq=False)
class Away:
    """A conversation whose answer has called tools.

    Attributes:
        went_s: when it was answered, on the clock of `Recognition`.
        num_announced: how often its return was announced.
        timer: for the end of the announcement; None where the return is not announced again.
    """

    tools: frozenset[str]
    model: str | None
    went_s: float
    num_announced: int = 0
    timer: asyncio.TimerHandle | None = None


class Recognition:
    """Finds the session of each call, and announces that a session comes back when its answer has called tools.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self, advisories: Advisories, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.conversations = Conversations()
        self.pauses = ToolPauses()
        self.runs = AgentRuns()
        self.counts: Counter[str] = Counter()
        """Calls by how their session was found."""
        self._advisories, self._metrics, self._clock = advisories, metrics, clock
        self._away: OrderedDict[tuple[str, str], Away] = OrderedDict()
        self._callers = Callers()

    async def began(
        self,
        owner: str,
        api: Api,
        headers: Mapping[str, str],
        body: Any,
        model: str | None,
        session_id: str,
        *,
        is_named: bool,
    ) -> SessionCall | None:
        """Return a call's session; None for a call that belongs to none. `ended` follows. Never raises: a call is answered without one, too.

        Args:
            owner: whose key it came with.
            api: the family of the call.
            headers: of the request.
            body: as the client sent it, with a stored history in front.
            model: the adapter that it names; None for the base model.
            session_id: the stored session that it belongs to; "" for none.
            is_named: whether it was the client who named that session; a session that was made for this call alone is only a proposal.
        """
        if api in COUNTING_APIS or not isinstance(body, dict):
            return None
        try:
            call, how = SessionCall(owner, session_id, model), "stored"
            if not is_named:
                length = headers.get("Content-Length", "")
                # What was packed, or read from a document, or said before, is not in that length.
                is_short = length.isdigit() and max(int(length), num_chars_of(body)) <= INLINE_BYTES
                found = (
                    fingerprint(api, body) if is_short else await asyncio.to_thread(fingerprint, api, body)
                )
                if found is None:
                    return None
                name = session_name(headers, body)
                call.conversation, how = self.conversations.began(tenant_of(owner), name, found, session_id)
                call.session_id = call.conversation.session_id
            if how in FIRST_CALLS and turn_of(body) == "begins":
                call.caller = self._caller_of(call, headers, body)
            self._metrics.session_calls.labels(how).inc()
            self.counts[how] += 1
            self.runs.asked(
                owner,
                call.session_id,
                self._clock(),
                model=model,
                caller=call.caller,
                offers_tools=bool(turn_of(body)),
                pause_s=self._came_back(call, body),
                is_rewritten=how == "rewritten",
            )
        except Exception:
            log.exception("the session of a call could not be found")
            return None
        return call

    def ended(self, call: SessionCall | None, reader: AnswerReader) -> None:
        """Note a call's answer, as far as it came, and announce the session's return if it calls tools. Only the first end counts. Never raises."""
        if call is None or call.is_over:
            return
        call.is_over = True
        try:
            tools = reader.tools if reader.is_complete else {}
            if call.conversation is not None:
                answer = marks(set(reader.tools), reader.answer) if reader.is_complete else None
                self.conversations.ended(call.conversation, answer, calls_tools=bool(tools))
            tokens = self.runs.answered(
                call.owner, call.session_id, self._clock(), reader.figures, calls_tools=bool(tools)
            )
            self._metrics.note_run_tokens(tokens)
            if call.at_end is not None:
                call.at_end()  # first: what the client says of its session counts for more than what its tools let expect
            if tools:
                self._goes_away(call, frozenset(tools.values()), handed_lines(reader.arguments))
        except Exception:
            log.exception("the end of a call could not be noted")

    async def find(self, owner: str, api: Api, body: Any) -> list[str]:
        """Return the key's session whose last call had this conversation, as a list of one; empty where it cannot be told."""
        found = await asyncio.to_thread(fingerprint, api, body)
        known = self.conversations.standing(tenant_of(owner), found) if found is not None else None
        return [known.session_id] if known is not None else []

    def _caller_of(self, call: SessionCall, headers: Mapping[str, str], body: dict[str, Any]) -> str:
        """Return the session that a new one works for: as its client says, by the task that was handed to it, or by the name that both have."""
        tenant, name = tenant_of(call.owner), caller_name(headers, body)
        if name:
            # Others of this name ask for a title, say.
            found = self.conversations.waiting(tenant, name)
            found = found or next(iter(self.conversations.named(tenant, name)), name)
        elif not (found := self._callers.caller_of(tenant, body)) and call.conversation is not None:
            # Many clients may share such a key.
            is_shared = session_name(headers, body).source == "prompt_cache_key"
            own_name = call.conversation.scope[1]
            found = "" if is_shared else self.conversations.waiting(tenant, own_name, call.conversation)
        return found if found != call.session_id else ""

    def _came_back(self, call: SessionCall, body: dict[str, Any]) -> float | None:
        """Return how long its tools took, of a call that brings their results, after noting it; None of any other."""
        away = self._away.get(key := (call.owner, call.session_id))
        if away is None:
            return None
        self._is_back(key)
        self._advisories.came_back(call.owner, call.session_id)
        if not ends_with_results(body):
            return None
        pause_s = self._clock() - away.went_s
        self.pauses.note(tenant_of(call.owner), away.tools, pause_s)
        return pause_s

    def _is_back(self, key: tuple[str, str]) -> None:
        """Forget a session that waits for its tools no longer; one that does not is ignored."""
        if (away := self._away.pop(key, None)) is not None and away.timer is not None:
            away.timer.cancel()
        owner, session_id = key
        self._callers.came_back(tenant_of(owner), session_id)

    def _goes_away(self, call: SessionCall, tools: frozenset[str], handed: list[bytes]) -> None:
        key = call.owner, call.session_id
        self._is_back(key)
        self._away[key] = away = Away(tools, call.model, self._clock())
        self._callers.went_away(tenant_of(call.owner), call.session_id, handed)
        if len(self._away) > MAX_AWAY:
            self._is_back(next(iter(self._away)))
        self._announce(key, away)

    def _announce(self, key: tuple[str, str], away: Away) -> None:
        """Announce a conversation's return, by what its tools took before, and again when that time is over."""
        owner, session_id = key
        if self._advisories.expects(owner, session_id):
            return  # the client has said more
        waited_s = self._clock() - away.went_s
        back = self.pauses.expected(tenant_of(owner), away.tools, waited_s)
        ttl_s = min(max(back.latest_s - waited_s, 0.0), MAX_TTL_S)
        wanted = AdvisoryRequest(
            session_id=session_id,
            model=away.model,
            expected_arrival_s=min(max(back.earliest_s - waited_s, 0.0), ttl_s),
            ttl_s=ttl_s,
        )
        likely = LIKELY_BACK if not away.num_announced else 0.5**away.num_announced
        away.num_announced += 1
        if away.num_announced < MAX_ANNOUNCED:
            loop = asyncio.get_running_loop()
            away.timer = loop.call_later(wanted.lifetime_s + GRACE_S, self._stays_away, key, away)
        try:
            # In a share of their own: what the client announces itself has its places and its rate.
            client = f"tools {owner}"
            self._advisories.submit(owner, wanted, "tool_pause", client=client, probability=likely)
        except GatewayError as error:
            log.debug("the return of a session was not announced: %s", error.code)

    def _stays_away(self, key: tuple[str, str], away: Away) -> None:
        if self._away.get(key) is away:
            try:
                self._announce(key, away)
            except Exception:
                log.exception("the return of a session was not announced again")
