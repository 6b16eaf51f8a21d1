"""Which earlier call an API call continues, so that clients that name no session have one for KV, advisories and routing. Pure.

Nothing of a conversation's text is kept, only hashes (`fingerprints.py`), and of each conversation only where it stands now. A call continues a
conversation if it begins with the same steps and has an answer next. So a call that goes back to an earlier state (an edit, a branch) begins another
one, as does one that could continue several of which none gave that answer. Clients also change the history that they send: they cut results of
tools short, leave out old messages, put the time into the system prompt. A call that has the last answer of one conversation, and of no other,
continues it, whatever became of its history, also where its last message tells the history as text. A name that the client gives bounds the search
to its own calls, and inside it a conversation may also begin anew: compacted, or edited. Names and conversations are a tenant's own.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from gateway.access.shares import Shares
from gateway.recognition.fingerprints import Answer, Fingerprint, State
from gateway.recognition.session_names import MADE, UNNAMED, SessionName

How = Literal["named", "continued", "retried", "rewritten", "new"]
# Conversations that are kept for one tenant, and for all: some 20 MB. Chosen.
MAX_OF_ONE, MAX_OF_ALL = 4096, 32768

Scope = tuple[str, str, str]
"""A tenant, and the names that its client gave the session and the agent in it; "" without one."""


class Conversation:
    """One conversation: where it stands, and what became of its last call.

    Attributes:
        session_id: the name that the engine, advisories and the router know it by.
        num_running: its calls that are being answered now.
        answer: the marks of its last answer; None while there is none, and after a call that failed.
        anchors: the hashes under which it is found by this answer; none while a call of it is being answered.
        anchors_before: those of the answer before that call, which hold again if it fails.
        calls_tools: whether its last answer calls tools, so that it will go on by itself.
    """

    def __init__(self, scope: Scope, session_id: str, found: Fingerprint) -> None:
        self.scope, self.session_id = scope, session_id
        self.asked(found)
        self.num_running = 0
        self.answer: Answer | None = None
        self.anchors: tuple[bytes, ...] = ()
        self.anchors_before: tuple[bytes, ...] = ()
        self.calls_tools = False

    def asked(self, found: Fingerprint) -> None:
        """Note the call that it has come to."""
        self.state, self.opening, self.exact = found.state, found.opening, found.exact
        self.before, self.telling = found.before, found.telling

    @property
    def key(self) -> str:
        """The session's name, distinct from the names of other tenants' sessions."""
        return _key(self.scope[0], self.session_id)


class Recognised(NamedTuple):
    """A call's conversation, and how it was recognised."""

    conversation: Conversation
    how: How


class Conversations:
    """Conversations of calls that name no stored session. Finding one costs a look-up for each step of a call."""

    def __init__(self) -> None:
        self._at: dict[tuple[Scope, bytes], list[Conversation]] = {}
        """Conversations by where they stand."""
        self._answered: dict[tuple[Scope, bytes], list[Conversation]] = {}
        """Conversations by the anchors of their last answers."""
        self._named: dict[tuple[str, str], list[Conversation]] = {}
        self._shares: Shares[str] = Shares(MAX_OF_ONE, MAX_OF_ALL)
        self._by_session: dict[str, Conversation] = {}

    def __len__(self) -> int:
        return len(self._by_session)

    def began(self, tenant: str, name: SessionName, found: Fingerprint, proposed: str = "") -> Recognised:
        """Return the conversation of a call that begins now. `ended` follows. proposed: the name of a new session that the client has not named."""
        scope = (tenant, name.name, name.agent)
        conversation, how = self._find(scope, name, found)
        if conversation is None:
            conversation = self._add(scope, found, proposed)
        else:
            self._move(conversation, found)
        conversation.num_running += 1
        return Recognised(conversation, how)

    def ended(self, conversation: Conversation, answer: Answer | None, *, calls_tools: bool = False) -> None:
        """Note that a call was answered, or failed (None)."""
        conversation.num_running -= 1
        conversation.answer, conversation.calls_tools = answer, calls_tools
        if answer is None:
            self._set_anchors(conversation, conversation.anchors_before)
        else:
            anchors = answer.anchors(conversation.opening, conversation.before)
            if (telling := conversation.telling) is not None and answer.line:
                anchors += (telling.place(answer.line),)
            self._set_anchors(conversation, anchors)

    def named(self, tenant: str, name: str) -> list[str]:
        """Return the tenant's sessions under a client's name, in the order in which they began."""
        return [each.session_id for each in self._named.get((tenant, name), ())]

    def waiting(self, tenant: str, name: str, but: Conversation | None = None) -> str:
        """Return the session under a client's name that waits for its tools, other than that of one conversation; "" for none."""
        own = self._named.get((tenant, name), ())
        waiting = (each for each in own if each.calls_tools and not each.num_running and each is not but)
        return next((each.session_id for each in waiting), "")

    def standing(self, tenant: str, found: Fingerprint) -> Conversation | None:
        """Return the tenant's unnamed conversation whose last call was this one, or which this one continues; None where none or several may be."""
        scope = (tenant, "", "")
        here = [each for each in self._at.get((scope, found.prefixes[-1]), ()) if each.state == found.state]
        return here[0] if len(here) == 1 else self._find(scope, UNNAMED, found)[0]

    # -- finding -----------------------------------------------------------------------------------------------------

    def _find(self, scope: Scope, name: SessionName, found: Fingerprint) -> tuple[Conversation | None, How]:
        changed: list[Conversation] = []
        for known, answer in self._continued(scope, found):
            likely = [each for each in known if each.answer is not None and each.answer.is_like(answer)]
            likely = _nearest(likely, found)
            if len(likely) > 1 and answer.has_counted_ids_alone:
                return None, "new"  # their calls of tools have the same ids, and may be other ones
            # Conversations at the same place with the same answer cannot be told apart and need not be: their KV is the same.
            if likely:
                return min(likely, key=lambda each: each.num_running), "continued"
            if found.is_next_after(known[0].state):
                changed = [each for each in known if each.exact == found.exact]
            break
        for each in self._at.get((scope, found.prefixes[-1]), ()):
            is_same = each.state == found.state and each.exact == found.exact
            if each.answer is None and not each.num_running and is_same:
                return each, "retried"
        if (anchored := self._anchored(scope, found)) is not None:
            return anchored, "rewritten"
        if changed:
            # A client may have changed the answer before it sent it back.
            return (changed[0], "continued") if len(changed) == 1 else (None, "new")
        if (begun_anew := self._begun_anew(scope, name, found)) is not None:
            return begun_anew, "rewritten"
        return None, "named" if name.name and scope[:2] not in self._named else "new"

    def _anchored(self, scope: Scope, found: Fingerprint) -> Conversation | None:
        """Return the conversation whose last answer this call has; None where it has that of none, or of several."""
        for anchor in found.anchors():
            if known := _nearest(self._answered.get((scope, anchor), ()), found):
                return known[0] if len(known) == 1 else None
        return self._told(scope, found)

    def _told(self, scope: Scope, found: Fingerprint) -> Conversation | None:
        """Return the conversation that this call's last message tells on; None where it tells none, or several."""
        places = found.places() if self._answered else {}
        for place, num_before in places.items():
            known = self._answered.get((scope, place), ())
            told = [(each.telling, each) for each in known if each.telling is not None]
            # The answer stands behind what was asked: in the midst of it, its line is the prompt's own.
            nums_told = found.lines_told([telling for telling, _ in told]) if told else []
            nums_lines = [num if num <= num_before else 0 for num in nums_told]
            most = max(nums_lines, default=0)
            likely = [each for num, (_, each) in zip(nums_lines, told, strict=True) if num == most]
            if most and (nearest := _nearest(likely, found)):
                return nearest[0] if len(nearest) == 1 else None
        return None

    def _begun_anew(self, scope: Scope, name: SessionName, found: Fingerprint) -> Conversation | None:
        """Return the conversation of this name that begins anew, under the same instructions."""
        if not name.name or name.source == "prompt_cache_key":
            return None  # many clients may share such a key
        own = [each for each in self._named.get(scope[:2], ()) if each.scope == scope]
        # A conversation that waits for its tools comes back with their results. Perhaps they are agents, of which this is one.
        if any(each.calls_tools and not each.num_running for each in own):
            return None
        return next((each for each in own if each.exact == found.exact and not each.num_running), None)

    def _continued(self, scope: Scope, found: Fingerprint) -> Iterator[tuple[list[Conversation], Answer]]:
        """Yield the conversations that this call begins with and answers, the longest first, with the answer that it has next."""
        for prefix in reversed(found.prefixes):
            by_answer: dict[State, list[Conversation]] = {}
            for each in self._at.get((scope, prefix), ()):
                by_answer.setdefault(each.state, []).append(each)
            for state, known in by_answer.items():
                answer = found.answer_after(state)
                if answer is not None:
                    yield known, answer

    # -- keeping -----------------------------------------------------------------------------------------------------

    def _add(self, scope: Scope, found: Fingerprint, proposed: str) -> Conversation:
        tenant, name, _ = scope
        own = self._named.setdefault((tenant, name), []) if name else []
        session_id = name or proposed
        if not session_id or _key(tenant, session_id) in self._by_session:
            session_id = f"{MADE}{uuid.uuid4().hex}"
        conversation = Conversation(scope, session_id, found)
        own.append(conversation)
        self._by_session[conversation.key] = conversation
        self._at.setdefault((scope, conversation.state.prefix), []).append(conversation)
        if (loser := self._shares.put(conversation.key, tenant)) is not None:
            self._drop(self._by_session[loser])
        return conversation

    def _move(self, conversation: Conversation, found: Fingerprint) -> None:
        self._take_out(conversation)
        conversation.anchors_before = conversation.anchors or conversation.anchors_before
        self._set_anchors(conversation, ())
        conversation.asked(found)
        self._at.setdefault((conversation.scope, conversation.state.prefix), []).append(conversation)
        self._shares.touch(conversation.key)

    def _take_out(self, conversation: Conversation) -> None:
        key = (conversation.scope, conversation.state.prefix)
        self._at[key].remove(conversation)
        if not self._at[key]:
            del self._at[key]

    def _set_anchors(self, conversation: Conversation, anchors: tuple[bytes, ...]) -> None:
        if self._by_session.get(conversation.key) is not conversation:
            return  # it was forgotten meanwhile
        for anchor in conversation.anchors:
            key = (conversation.scope, anchor)
            self._answered[key].remove(conversation)
            if not self._answered[key]:
                del self._answered[key]
        conversation.anchors = anchors
        for anchor in anchors:
            self._answered.setdefault((conversation.scope, anchor), []).append(conversation)

    def _drop(self, conversation: Conversation) -> None:
        self._set_anchors(conversation, ())
        del self._by_session[conversation.key]
        self._take_out(conversation)
        named = conversation.scope[:2]
        own = self._named.get(named, [])
        if conversation in own:
            own.remove(conversation)
            if not own:
                del self._named[named]


def _nearest(known: Sequence[Conversation], found: Fingerprint) -> list[Conversation]:
    """Return those under a call's very instructions; without any, those that are not being answered, whose instructions differ in digits."""
    exact = [each for each in known if each.exact == found.exact]
    return exact or [each for each in known if not each.num_running]


def _key(tenant: str, session_id: str) -> str:
    return f"{tenant}\0{session_id}"
