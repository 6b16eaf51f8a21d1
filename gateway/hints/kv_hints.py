"""Hints of KV acted on: each is granted within the share of its client, becomes advice to the node, and is counted.

Those about the session of their own request wait for its answer, whose KV they are about. Those about another session act at once. A session is
looked for among those of the same key alone. What each action does is in docs/protocol.md, "Hints of KV".
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from engine_bridge.policy.kv.hints import Grant, HintShares, KvAction, KvHint
from engine_bridge.protocol.node import Api, Node, SessionHint
from gateway.access.auth import tenant_of
from gateway.access.rates import Rates
from gateway.access.shares import Shares
from gateway.advisories.advisories import (
    BURST,
    MAX_PER_S,
    MAX_TTL_S,
    Advisories,
    AdvisoryRecord,
    AdvisoryRequest,
    SessionName,
)
from gateway.errors import GatewayError
from gateway.hints.parsing import CallHints
from gateway.metrics.metrics import Metrics
from gateway.recognition.recognition import Recognition, SessionCall

log = logging.getLogger(__name__)

# Hints sent by themselves that can be asked for and taken back, of one key and of all; the oldest is forgotten first. Chosen.
MAX_RECORDS_OF_ONE, MAX_RECORDS = 512, 4096
# Conversations under one client's name that a hint about the name is for, the latest ones. Chosen.
MAX_OF_NAME = 16
# What a reply's header tells of at most. Chosen.
MAX_TOLD = 16
# The field of each API that holds a conversation.
_CONVERSATIONS: tuple[tuple[Api, str], ...] = (
    ("chat", "messages"),
    ("responses", "input"),
    ("completions", "prompt"),
)


class KvHintRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/kv_hints`: what is to be done, and a session by its name or by what its last call had said.

    model, system: as that call had them. expected_arrival_s: of a prefetch.
    """

    action: KvAction
    session_id: SessionName | None = None
    messages: list[Any] | None = None
    input: str | list[Any] | None = None
    prompt: str | list[int] | None = None
    model: str | None = None
    system: str | list[Any] | None = None
    instructions: str | None = None
    ttl_s: Annotated[float, Meta(ge=0)] | None = None
    expected_arrival_s: Annotated[float, Meta(ge=0)] | None = None


@dataclass(frozen=True, slots=True)
class Asker:
    """The sender of a hint. client: whose share the hint counts for. model: the adapter whose KV is meant; None for the base model."""

    owner: str
    client: str
    model: str | None = None


@dataclass(slots=True)
class HintRecord:
    """A hint that was sent by itself.

    Attributes:
        sessions: the node's names of the sessions that it is about.
        outcome: that of its grant, or `unknown` where no session was found, `refused` where the advisory was.
        advisories: the advisories begun for it.
    """

    asker: Asker
    hint: KvHint
    sessions: list[str]
    outcome: str
    ttl_s: float
    until_s: float
    advisories: list[AdvisoryRecord] = field(default_factory=list)
    id: str = field(default_factory=lambda: f"kvh-{uuid.uuid4().hex}")

    def describe(self, now: float) -> dict[str, Any]:
        """Return the record as JSON values. Source: docs/protocol.md."""
        return {
            "id": self.id,
            "object": "kv_hint",
            "action": self.hint.action,
            "session_id": self.hint.session or (self.sessions[0] if self.sessions else None),
            "outcome": self.outcome,
            "granted_ttl_s": self.ttl_s,
            "expires_in_s": round(max(self.until_s - now, 0.0), 3),
            "scope": "session",
            "advisories": [each.id for each in self.advisories],
        }


class KvHints:
    """Acts on hints.

    Args:
        advisories: prefetches and pins become some.
        recognition: knows which sessions a key has.
        node: is told of the rest.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        advisories: Advisories,
        recognition: Recognition,
        node: Node,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shares = HintShares()
        # The same limits as for advisories: the engine's thread looks up the blocks of each demoted session.
        self._rates = Rates(MAX_PER_S, BURST)
        self._advisories, self._recognition, self._node = advisories, recognition, node
        self._metrics, self._clock = metrics, clock
        self._records: dict[str, HintRecord] = {}
        self._places: Shares[str] = Shares(MAX_RECORDS_OF_ONE, MAX_RECORDS)

    # -- of a request ------------------------------------------------------------------------------------------------

    def heard(self, asker: Asker, call: SessionCall | None, found: CallHints) -> str:
        """Act on what a call says of KV, and return what a header tells its client of it; "" for nothing. Never raises: hints fail no request."""
        try:
            return ", ".join(self._heard(asker, call, found)[:MAX_TOLD])
        except Exception:
            log.exception("the hints of a call could not be acted on")
            return ""

    def _heard(self, asker: Asker, call: SessionCall | None, found: CallHints) -> list[str]:
        told: list[str] = []
        for source, action, outcome in found.noted:
            self._count(source, action, outcome)
            told.append(f"{action}={outcome}")
        for payload in found.advised:
            told.append(f"session.advise={self._advise(asker, payload)}")
        own = [hint for hint in found.hints if not hint.session]
        for hint in found.hints:
            if hint.session:
                record = self._begin(asker, hint, self._sessions(asker, hint.session))
                told.append(_told(hint, record.outcome, record.ttl_s))
        granted: list[tuple[KvHint, Grant]] = []
        for hint in own:
            grant = self._grant(asker, call.session_id, hint) if call is not None else None
            outcome = "unknown" if call is None else grant.outcome if grant is not None else "refused"
            self._count(hint.source, hint.action, outcome)
            told.append(_told(hint, outcome, grant.ttl_s if grant is not None else 0.0))
            if grant is not None and grant.outcome != "full":
                granted.append((hint, grant))
        if call is not None and (granted or self._pinned_s(asker, call.session_id)):
            call.at_end = partial(self._ended, asker, call, granted)
        return told

    def _ended(self, asker: Asker, call: SessionCall, granted: list[tuple[KvHint, Grant]]) -> None:
        """Act on a call's hints about its own session, whose KV is there now; and renew its pin, which its request has ended."""
        for hint, grant in granted:
            self._act(asker, call.session_id, hint, grant.ttl_s, [])
        is_pinned = any(hint.action == "pin" for hint, _ in granted)
        if not is_pinned and (left_s := self._pinned_s(asker, call.session_id)):
            self._act(asker, call.session_id, KvHint("pin", "rest"), left_s, [])

    def _advise(self, asker: Asker, payload: Any) -> str:
        try:
            wanted = msgspec.convert(payload, AdvisoryRequest)
            self._advisories.submit(asker.owner, wanted, "hint", client=asker.client)
        except msgspec.ValidationError:
            outcome = "malformed"
        except GatewayError:
            outcome = "refused"
        else:
            outcome = "granted"
        self._count("kv_hints", "prefetch", outcome)
        return outcome

    # -- by themselves -----------------------------------------------------------------------------------------------

    async def submit(self, asker: Asker, wanted: KvHintRequest) -> HintRecord:
        """Act on a hint that came by itself. Raises GatewayError `bad_request` for a hint without a subject."""
        hint = KvHint(wanted.action, "rest", wanted.session_id or "", wanted.ttl_s, wanted.expected_arrival_s)
        if wanted.session_id is not None:
            return self._begin(asker, hint, self._sessions(asker, wanted.session_id))
        body = {name: value for name, value in msgspec.structs.asdict(wanted).items() if value is not None}
        api = next((api for api, name in _CONVERSATIONS if name in body), None)
        if api is None:
            raise GatewayError(
                "bad_request",
                "Say what the hint is about: 'session_id', or the 'messages', 'input' or 'prompt' of its last call.",
                param="session_id",
            )
        return self._begin(asker, hint, await self._recognition.find(asker.owner, api, body))

    def submit_all(self, asker: Asker, found: CallHints) -> list[HintRecord]:
        """Act on the hints of an envelope that came by itself; `found.noted` then has all that were passed over, also those about no session."""
        for source, action, outcome in found.noted:
            self._count(source, action, outcome)
        for payload in found.advised:
            if (outcome := self._advise(asker, payload)) != "granted":
                found.noted.append(("kv_hints", "prefetch", outcome))
        for hint in found.hints:
            if not hint.session:
                self._count(hint.source, hint.action, "malformed")
                found.noted.append((hint.source, hint.action, "malformed"))
        return [
            self._begin(asker, hint, self._sessions(asker, hint.session))
            for hint in found.hints
            if hint.session
        ]

    def find(self, owner: str, hint_id: str) -> HintRecord:
        """Return a hint by its id. Raises GatewayError `not_found`, also for another owner's."""
        record = self._records.get(hint_id)
        if record is None or record.asker.owner != owner:
            raise GatewayError("not_found", "There is no hint with this id, or not any more.")
        return record

    def take_back(self, owner: str, hint_id: str) -> None:
        """End what a hint has begun. Raises GatewayError `not_found`."""
        record = self.find(owner, hint_id)
        del self._records[hint_id]
        self._places.drop(hint_id)
        action = record.hint.action
        for each in record.advisories:
            self._advisories.cancel(owner, each.id)
        if action in ("prefetch", "evict"):
            return
        over = KvHint(action, record.hint.source, ttl_s=0.0)
        for session in record.sessions:
            self.shares.grant(record.asker.client, session, over, self._clock())
            self._act(record.asker, session, over, 0.0, [])

    # -- acting ------------------------------------------------------------------------------------------------------

    def _sessions(self, asker: Asker, name: str) -> list[str]:
        """Return the key's sessions under a client's name; a name of none of them may be that of a stored session."""
        return self._recognition.conversations.named(tenant_of(asker.owner), name)[-MAX_OF_NAME:] or [name]

    def _grant(self, asker: Asker, session: str, hint: KvHint) -> Grant | None:
        """Return what the asker gets of a hint for a session; None where it has sent too many."""
        now = self._clock()
        return (
            None
            if self._rates.take(asker.client, now)
            else self.shares.grant(asker.client, session, hint, now)
        )

    def _pinned_s(self, asker: Asker, session: str) -> float:
        return self.shares.left_s(asker.client, session, self._clock(), is_pin=True)

    def _begin(self, asker: Asker, hint: KvHint, sessions: list[str]) -> HintRecord:
        """Act on a hint at once. The worst that became of it for one of the sessions is its outcome."""
        outcome, ttl_s, begun = "granted" if sessions else "unknown", 0.0, list[AdvisoryRecord]()
        for session in sessions:
            grant = self._grant(asker, session, hint)
            if grant is None:
                outcome = "refused"
                break
            one: str = grant.outcome
            if grant.outcome != "full" and not self._act(asker, session, hint, grant.ttl_s, begun):
                one = "refused"
            ttl_s = max(ttl_s, grant.ttl_s)
            outcome = one if one != "granted" else outcome
        record = HintRecord(asker, hint, sessions, outcome, ttl_s, self._clock() + ttl_s, begun)
        self._records[record.id] = record
        if (loser := self._places.put(record.id, asker.owner)) is not None:
            del self._records[loser]
        self._count(hint.source, hint.action, outcome)
        return record

    def _act(
        self, asker: Asker, session: str, hint: KvHint, ttl_s: float, begun: list[AdvisoryRecord]
    ) -> bool:
        """Do what a hint was granted for a session. Advisories are added to `begun`. Returns False if one was refused."""
        action, tenant = hint.action, tenant_of(asker.owner)
        told = SessionHint(session_id=session, tenant=tenant, adapter=asker.model)
        if action == "evict":
            self._advisories.end_session(asker.owner, session)
            # Before the node forgets which blocks the session has.
            self._node.hint_session(msgspec.structs.replace(told, is_idle=True))
            self._node.end_session(tenant, session)
            return True
        if action == "demote" or (action == "pin" and not ttl_s):
            self._advisories.end_session(asker.owner, session)
        if action != "prefetch":
            kept_s = self.shares.left_s(asker.client, session, self._clock(), is_pin=False)
            keep_s = max(ttl_s, kept_s) if action in ("pin", "demote") else ttl_s
            is_idle = action == "demote" and ttl_s > 0
            self._node.hint_session(
                msgspec.structs.replace(told, keep_s=keep_s, is_shared=action == "share", is_idle=is_idle)
            )
        if action not in ("prefetch", "pin") or not ttl_s:
            return True
        arrival_s = min(hint.arrival_s, MAX_TTL_S) if hint.arrival_s is not None else None
        wanted = AdvisoryRequest(
            session_id=session, model=asker.model, expected_arrival_s=arrival_s, ttl_s=ttl_s
        )
        try:
            begun.append(
                self._advisories.submit(
                    asker.owner, wanted, "hint", client=asker.client, is_pin=action == "pin"
                )
            )
        except GatewayError:
            return False
        return True

    def _count(self, source: str, action: str, outcome: str) -> None:
        self._metrics.kv_hints.labels(source, action, outcome).inc()


def _told(hint: KvHint, outcome: str, ttl_s: float) -> str:
    return f"{hint.action}={outcome}" + (f";ttl={ttl_s:g}" if ttl_s else "")
