"""The fields by which clients say something of KV, read into `KvHint`s. Pure; what is unknown or malformed is counted, and never an error.

Sources: OpenAI's `prompt_cache_retention` and `prompt_cache_options`; Anthropic's `cache_control`; the envelope of vLLM and SGLang (`kv_hints`, RFCs
#51428, #53421, sglang #36224) with vLLM's payload of `kv.retain`; vLLM's RFC #52113 (`agent_hint`); Dynamo's `nvext.agent_hints` and
`nvext.agent_context`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from engine_bridge.policy.kv.hints import ACTIONS, HintSource, KvAction, KvHint
from engine_bridge.protocol.node import Api
from gateway.settings.priorities import MAX_PRIORITY

# Taken out of a body before vLLM's classes see it: their models may know fields of these names in another form.
FIELDS = (
    "kv_hints",
    "agent_hint",
    "nvext",
    "prompt_cache_retention",
    "prompt_cache_options",
    "cache_control",
)
# The most hints of one source in a call. Chosen: as in an envelope of advisories.
MAX_HINTS = 64
# By which clients of Dynamo say that this call is its session's last one.
FINAL_HEADER = "X-Dynamo-Session-Final"
MAX_NAME_CHARS = 128
# Source: OpenAI's guide to prompt caching: unused prefixes stay for 5 to 10 minutes in memory, a day where that is asked for, 30 minutes by default
# where a request has options.
RETENTION_S = {"in_memory": 600.0, "in-memory": 600.0, "24h": 86400.0}
OPTIONS_TTL_S = 1800.0
# Source: Anthropic's documentation of prompt caching.
CONTROL_TTL_S = 300.0
# Steps of `strict_priority`, each of which outweighs all of `priority`. Chosen.
STRICT_STEP = 100
_DURATION = re.compile(r"(\d{1,5})(s|m|h)")
_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
# Other names of the actions. Source: RFC #52113 (offload), sglang #27574 (deref, release).
_ALIASES: dict[str, KvAction] = {"offload": "demote", "deref": "evict", "release": "evict"}
_MARKS: dict[str, HintSource] = {"cache_control": "anthropic", "prompt_cache_breakpoint": "openai"}


@dataclass(slots=True)
class CallHints:
    """The hints about KV in a call.

    Attributes:
        hints: about sessions.
        advised: payloads of `session.advise`, our own action, as they came.
        priority: what Dynamo's two priorities come to, lower first; None without them. It is not yet checked whether the key may have it.
        expected_tokens: how long the client expects the answer to be; None where it does not say.
        is_marked: whether the client marks parts of its prompt to be kept.
        noted: source, action and outcome of hints that concern no session, and of hints ignored as `malformed` or `unsupported`.
    """

    hints: list[KvHint] = field(default_factory=list)
    advised: list[Any] = field(default_factory=list)
    priority: int | None = None
    expected_tokens: int | None = None
    is_marked: bool = False
    noted: list[tuple[HintSource, str, str]] = field(default_factory=list)

    def note(self, source: HintSource, action: str = "unknown", outcome: str = "malformed") -> None:
        """Note what became of something. The client's own words never become a metric's label."""
        self.noted.append((source, action, outcome))

    def limit_priority(self, *, may_hurry: bool) -> None:
        """Give the call the priority that it asks for, or the usual one where it may not go before others."""
        if self.priority is not None:
            is_clipped = self.priority < 0 and not may_hurry
            self.priority = 0 if is_clipped else self.priority
            self.note("nvext", "priority", "clipped" if is_clipped else "granted")


def hints_of(api: Api, body: Any, headers: Mapping[str, str] = MappingProxyType({})) -> CallHints:
    """Return what a call's body and headers say of KV."""
    found = CallHints()
    if headers.get(FINAL_HEADER, "").strip().lower() in ("true", "1"):
        found.hints.append(KvHint("evict", "nvext"))
    if isinstance(body, dict):
        _read_marks(api, body, found)
        _read_openai(body, found)
        if (envelope := body.get("kv_hints")) is not None:
            read_envelope(envelope, found)
        if (hint := body.get("agent_hint")) is not None:
            _read_agent_hint(hint, found)
        if (extension := body.get("nvext")) is not None:
            _read_nvext(extension, found)
    return found


def strip(body: Any) -> None:
    """Take the fields that `hints_of` and the names of sessions were read from out of a body."""
    if isinstance(body, dict):
        for name in FIELDS:
            body.pop(name, None)


def seconds_of(value: Any) -> float | None:
    """Return a time as clients write it: a number of seconds, or `5m`, `1h`; None for anything else."""
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        return int(match[1]) * _UNIT_S[match[2]] if match is not None else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        seconds = float(value)
    except OverflowError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def action_of(name: Any) -> KvAction | None:
    """Return the action of this name, also as `kv.retain` or by another project's word for it; None for an unknown one."""
    if not isinstance(name, str) or len(name) > MAX_NAME_CHARS:
        return None
    short = name.lower().removeprefix("kv.")
    return _ALIASES.get(short) or (short if short in ACTIONS else None)  # type: ignore[return-value]


# -- OpenAI and Anthropic ------------------------------------------------------------------------------------------------


def _read_openai(body: Mapping[str, Any], found: CallHints) -> None:
    options, retention = body.get("prompt_cache_options"), body.get("prompt_cache_retention")
    has_marks = any(hint.source == "openai" for hint in found.hints)
    if options is not None:
        ttl = options.get("ttl") if isinstance(options, dict) else options
        ttl_s = OPTIONS_TTL_S if ttl is None else seconds_of(ttl)
        if not isinstance(options, dict) or ttl_s is None:
            found.note("openai", "retain")
        elif options.get("mode") != "explicit" or has_marks:
            # Without marks an explicit mode asks for nothing to be kept.
            found.hints[:] = [hint for hint in found.hints if hint.source != "openai"]
            found.hints.append(KvHint("retain", "openai", ttl_s=ttl_s))
    elif retention is not None:
        known_s = RETENTION_S.get(retention) if isinstance(retention, str) else None
        if known_s is None:
            found.note("openai", "retain")
        else:
            found.hints.append(KvHint("retain", "openai", ttl_s=known_s))


def _read_marks(api: Api, body: Mapping[str, Any], found: CallHints) -> None:
    """Read the marks on parts of a prompt. A call's KV is kept as a whole, so the longest time counts."""
    longest: dict[HintSource, float] = {}
    for name, mark in _marks(api, body):
        source = _MARKS[name]
        ttl = mark.get("ttl") if isinstance(mark, dict) else mark
        ttl_s = seconds_of(ttl)
        if ttl is None:
            ttl_s = CONTROL_TTL_S if source == "anthropic" else OPTIONS_TTL_S
        if not isinstance(mark, dict) or ttl_s is None:
            if len(found.noted) < MAX_HINTS:
                found.note(source, "retain")
            continue
        longest[source] = max(longest.get(source, 0.0), ttl_s)
    for source, ttl_s in longest.items():
        found.is_marked = True
        found.hints.append(KvHint("retain", source, ttl_s=ttl_s))


def _marks(api: Api, body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the marks of a call in the order of its prompt: tools, system prompt, messages, the whole call."""
    messages = body.get("input" if api == "responses" else "messages")
    for entries in (body.get("tools"), [{"content": body.get("system")}], messages):
        for entry in entries if isinstance(entries, list) else ():
            content = entry.get("content") if isinstance(entry, dict) else None
            for piece in content if isinstance(content, list) else ():
                yield from _marks_on(piece)
            yield from _marks_on(entry)
    yield from _marks_on(body)


def _marks_on(piece: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(piece, dict):
        for name in _MARKS:
            if (mark := piece.get(name)) is not None:
                yield name, mark


# -- envelopes -----------------------------------------------------------------------------------------------------------


def read_envelope(envelope: Any, found: CallHints) -> None:
    """Read an envelope of actions, or SGLang's earlier form of it, an object of actions by name."""
    actions = envelope.get("actions") if isinstance(envelope, dict) else None
    if isinstance(envelope, dict) and "actions" not in envelope:
        actions = [{"action_type": name, "payload": payload} for name, payload in envelope.items()]
    if not isinstance(actions, list):
        found.note("kv_hints")
        return
    for action in actions[:MAX_HINTS]:
        _read_action(action, found)
    for _ in actions[MAX_HINTS : 2 * MAX_HINTS]:
        found.note("kv_hints")


def _read_action(action: Any, found: CallHints) -> None:
    payload = action.get("payload") if isinstance(action, dict) else None
    if not isinstance(payload, dict):
        found.note("kv_hints")
        return
    if action.get("action_type") == "session.advise":
        found.advised.append(payload)
        return
    known = action_of(action.get("action_type"))
    if known is None:
        found.note("kv_hints", outcome="unsupported")
    elif (hint := hint_of(known, "kv_hints", payload)) is None:
        found.note("kv_hints", known)
    else:
        found.hints.append(hint)


def hint_of(action: KvAction, source: HintSource, payload: Mapping[str, Any]) -> KvHint | None:
    """Return a hint from the fields of an action; None where one of them is malformed."""
    inner = payload.get("target")
    target = {**payload, **inner} if isinstance(inner, dict) else payload
    session = next((target[name] for name in ("session_id", "session") if target.get(name) is not None), "")
    if not _is_name(session):
        return None
    times: list[float | None] = []
    for names in (("ttl_s", "ttl", "duration"), ("expected_arrival_s", "arrival_s")):
        given = next((payload[name] for name in names if payload.get(name) is not None), None)
        times.append(seconds_of(given))
        if given is not None and times[-1] is None:
            return None
    ttl_s, arrival_s = times
    if (directives := payload.get("directives")) is not None:
        if (directed := _longest(directives)) is None:
            return None
        ttl_s = directed
    return KvHint(action, source, session, ttl_s, arrival_s)


def _longest(directives: Any) -> float | None:
    """Return the longest time in directives of vLLM's `kv.retain`, 0 where all of them release; None where one is malformed."""
    longest = 0.0
    if not isinstance(directives, list) or len(directives) > 2 * MAX_HINTS:
        return None
    for directive in directives:
        priority = directive.get("priority") if isinstance(directive, dict) else None
        if isinstance(priority, bool) or not isinstance(priority, int):
            return None
        duration = directive.get("duration")
        seconds = RETENTION_S["24h"] if duration is None else seconds_of(duration)
        if seconds is None:
            return None
        longest = max(longest, seconds if priority > 0 else 0.0)
    return longest


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_NAME_CHARS and (not value or value.isprintable())


# -- agents --------------------------------------------------------------------------------------------------------------


def _read_agent_hint(hint: Any, found: CallHints) -> None:
    """Read vLLM's RFC #52113. A parent waits for the agents that it began, so it is kept for as long as they are."""
    if not isinstance(hint, dict):
        found.note("agent_hint")
        return
    session, parent = hint.get("session_id") or "", hint.get("parent_session_id") or ""
    control, management = hint.get("cache_control"), hint.get("context_management")
    ttl = control.get("ttl", CONTROL_TTL_S) if isinstance(control, dict) else control
    ttl = hint.get("ttl") if ttl is None else ttl
    if ttl is not None:
        ttl_s = seconds_of(ttl)
        if ttl_s is None or not _is_name(parent):
            found.note("agent_hint", "retain")
        else:
            found.hints.append(KvHint("retain", "agent_hint", ttl_s=ttl_s))
            if parent:
                found.hints.append(KvHint("retain", "agent_hint", parent, ttl_s))
    if management is None:
        return
    edits = management.get("edits", []) if isinstance(management, dict) else None
    if not isinstance(edits, list) or not _is_name(session):
        found.note("agent_hint")
        return
    # A request that only manages says something of a session that went before it.
    target = session if management.get("manage_request") is True else ""
    for edit in edits[:MAX_HINTS]:
        action = action_of(edit.get("type")) if isinstance(edit, dict) else None
        if action in ("demote", "prefetch", "evict"):
            found.hints.append(KvHint(action, "agent_hint", target))
        else:
            found.note("agent_hint", outcome="unsupported")


def _read_nvext(extension: Any, found: CallHints) -> None:
    hints = extension.get("agent_hints") if isinstance(extension, dict) else None
    context = extension.get("agent_context") if isinstance(extension, dict) else None
    if isinstance(context, dict) and context.get("session_final") is True:
        found.hints.append(KvHint("evict", "nvext"))
    if hints is None:
        return
    if not isinstance(hints, dict):
        found.note("nvext")
        return
    numbers = {name: _whole(hints.get(name)) for name in ("priority", "strict_priority", "osl")}
    for name, number in numbers.items():
        if hints.get(name) is not None and number is None:
            found.note("nvext", name)
    if numbers["priority"] is not None or numbers["strict_priority"] is not None:
        # Dynamo's higher ones go first, ours are the lower ones.
        most = STRICT_STEP // 2 - 1
        within = max(min(numbers["priority"] or 0, most), -most)
        total = (numbers["strict_priority"] or 0) * STRICT_STEP + within
        found.priority = -max(min(total, MAX_PRIORITY), -MAX_PRIORITY)
    if numbers["osl"] is not None:
        found.expected_tokens = max(numbers["osl"], 1)
        found.note("nvext", "osl", "granted")
    if (ahead := hints.get("speculative_prefill")) is True:
        found.hints.append(KvHint("prefetch", "nvext"))
    elif ahead not in (None, False):
        found.note("nvext", "prefetch")


def _whole(value: Any) -> int | None:
    """Return an integer of 32 bits; None for anything else."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and abs(value) < 1 << 31 else None
