"""What clients say of KV in the fields of other projects: read into one form; what is wrong is counted and never an error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.kv.hints import ACTIONS, KvHint
from gateway.hints.parsing import FIELDS, MAX_HINTS, CallHints, hints_of, strip

MARK = {"type": "ephemeral"}


def read(api: Any = "chat", **body: Any) -> CallHints:
    return hints_of(api, body)


def envelope(*actions: tuple[str, Any]) -> dict[str, Any]:
    return {
        "protocol_version": "0.1",
        "message_id": "m",
        "actions": [
            {"action_id": f"a{number}", "action_type": name, "action_version": "1.0", "payload": payload}
            for number, (name, payload) in enumerate(actions)
        ],
    }


@pytest.mark.parametrize(
    ("body", "ttl_s"),
    [
        ({"prompt_cache_retention": "in_memory"}, 600.0),
        ({"prompt_cache_retention": "24h"}, 86400.0),
        ({"prompt_cache_options": {}}, 1800.0),
        (
            {"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}, "prompt_cache_retention": "24h"},
            1800.0,
        ),
    ],
)
def test_openais_retention(body: dict[str, Any], ttl_s: float) -> None:
    for api in ("chat", "responses"):
        assert read(api, **body).hints == [KvHint("retain", "openai", ttl_s=ttl_s)]


def test_an_explicit_mode_keeps_what_is_marked_and_nothing_else() -> None:
    options = {"mode": "explicit", "ttl": "30m"}
    assert read(prompt_cache_options=options) == CallHints()
    part = {"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}
    found = read(prompt_cache_options=options, messages=[{"role": "user", "content": [part]}])
    assert [hint.ttl_s for hint in found.hints] == [1800.0] and found.is_marked


def test_the_longest_of_anthropics_marks_counts() -> None:
    text = {"type": "text", "text": "x"}
    found = read(
        "messages",
        tools=[{"name": "f", "cache_control": MARK | {"ttl": "1h"}}],
        system=[text | {"cache_control": MARK}],
        messages=[{"role": "user", "content": [text, text | {"cache_control": MARK | {"ttl": "5m"}}]}],
    )
    assert found.hints == [KvHint("retain", "anthropic", ttl_s=3600.0)]
    assert found.is_marked and not found.noted
    whole = read("messages", cache_control=MARK)
    assert whole.hints == [KvHint("retain", "anthropic", ttl_s=300.0)]


def test_the_actions_of_an_envelope() -> None:
    found = read(
        kv_hints=envelope(
            ("kv.prefetch", {"session_id": "s", "expected_arrival_s": 2}),
            ("retain", {"directives": [{"priority": 0}, {"start": 0, "priority": 9, "duration": 60}]}),
            ("kv.retain", {"directives": [{"priority": 0}]}),
            ("Pin", {"target": {"session": "s"}, "ttl": "5m"}),
            ("kv.demote", {}),
            ("share", {"ttl_s": 7.5}),
            ("kv.deref", {"session_id": "s"}),
            ("session.advise", {"session_id": "next"}),
        )
    )
    assert found.hints == [
        KvHint("prefetch", "kv_hints", "s", arrival_s=2.0),
        KvHint("retain", "kv_hints", ttl_s=60.0),
        KvHint("retain", "kv_hints", ttl_s=0.0),
        KvHint("pin", "kv_hints", "s", 300.0),
        KvHint("demote", "kv_hints"),
        KvHint("share", "kv_hints", ttl_s=7.5),
        KvHint("evict", "kv_hints", "s"),
    ]
    assert found.advised == [{"session_id": "next"}] and not found.noted
    assert read(kv_hints={"deref": {"action_id": "c"}}).hints == [KvHint("evict", "kv_hints")]


def test_an_agents_session_its_parent_and_its_edits() -> None:
    found = read(
        agent_hint={
            "session_id": "worker",
            "parent_session_id": "boss",
            "cache_control": {"type": "ephemeral", "ttl": 30.0},
            "context_management": {"edits": [{"type": "offload"}, {"type": "evict", "block_start": 2}]},
        }
    )
    assert found.hints == [
        KvHint("retain", "agent_hint", ttl_s=30.0),
        KvHint("retain", "agent_hint", "boss", 30.0),
        KvHint("demote", "agent_hint"),
        KvHint("evict", "agent_hint"),
    ]
    managing = {"manage_request": True, "edits": [{"type": "prefetch"}, {"type": "clear"}]}
    found = read(agent_hint={"session_id": "worker", "context_management": managing})
    assert found.hints == [KvHint("prefetch", "agent_hint", "worker")]
    assert found.noted == [("agent_hint", "unknown", "unsupported")]


def test_dynamos_hints() -> None:
    found = read(nvext={"agent_hints": {"priority": 5, "osl": 1024, "speculative_prefill": True}})
    assert (found.priority, found.expected_tokens) == (-5, 1024)
    assert found.hints == [KvHint("prefetch", "nvext")]
    assert read(nvext={"agent_hints": {"priority": -3}}).priority == 3
    found.limit_priority(may_hurry=True)
    assert found.priority == -5 and found.noted[-1] == ("nvext", "priority", "granted")
    found.limit_priority(may_hurry=False)
    assert found.priority == 0 and found.noted[-1] == ("nvext", "priority", "clipped")
    high, higher = (
        read(nvext={"agent_hints": {"priority": priority, "strict_priority": strict}}).priority
        for priority, strict in ((10**6, 1), (-50, 2))
    )
    assert high is not None and higher is not None and higher < high < 0
    assert hints_of("chat", {}, {"X-Dynamo-Session-Final": "true"}).hints == [KvHint("evict", "nvext")]
    assert not hints_of("chat", {}, {"X-Dynamo-Session-Final": "false"}).hints
    assert read(nvext={"agent_context": {"session_id": "s", "session_final": True}}).hints == [
        KvHint("evict", "nvext")
    ]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt_cache_retention": "for ever"},
        {"prompt_cache_retention": ["24h"]},
        {"prompt_cache_options": 7},
        {"prompt_cache_options": {"ttl": "-1h"}},
        {"cache_control": "ephemeral"},
        {"tools": [{"cache_control": {"ttl": {"h": 1}}}]},
        {"kv_hints": []},
        {"kv_hints": {"actions": {}}},
        {"kv_hints": envelope(("kv.pin", {"session_id": "x" * 129}))},
        {"kv_hints": envelope(("kv.pin", {"ttl_s": True}))},
        {"kv_hints": envelope(("kv.pin", {"ttl_s": -1}))},
        {"kv_hints": envelope(("kv.pin", {"ttl_s": 10**400}))},
        {"kv_hints": envelope(("kv.retain", {"directives": [{"priority": "high"}]}))},
        {"kv_hints": envelope(("kv.sing", {}))},
        {"kv_hints": envelope(("kv.pin", None))},
        {"agent_hint": "worker"},
        {"agent_hint": {"cache_control": {"ttl": float("inf")}}},
        {"agent_hint": {"context_management": {"edits": [7]}}},
        {"nvext": {"agent_hints": {"osl": "many"}}},
        {"nvext": {"agent_hints": {"priority": 1 << 40}}},
        {"nvext": {"agent_hints": {"speculative_prefill": "yes"}}},
    ],
)
def test_what_is_wrong_is_counted_and_passed_over(body: dict[str, Any]) -> None:
    found = hints_of("messages", body)
    assert found.noted and not found.hints
    assert all(
        action in ACTIONS | {"unknown", "priority", "strict_priority", "osl"} for _, action, _ in found.noted
    )
    strip(body)
    assert not set(body) & set(FIELDS)


def test_thousands_of_marks_and_actions_make_few_hints() -> None:
    block = {"type": "text", "text": "x", "cache_control": MARK}
    bad = block | {"cache_control": 7}
    found = read("messages", messages=[{"role": "user", "content": [block, bad] * 5000}])
    assert len(found.hints) == 1 and len(found.noted) <= MAX_HINTS
    found = read(kv_hints=envelope(*[("kv.pin", {})] * 5000))
    assert len(found.hints) == MAX_HINTS and len(found.noted) <= MAX_HINTS


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(
                "actions action_type payload session_id target ttl directives priority agent_hints osl edits type "
                "context_management cache_control content agent_context mode".split()
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from([*FIELDS, "messages", "tools", "system", "input"]), JSON, max_size=5))
def test_no_body_makes_reading_fail(body: dict[str, Any]) -> None:
    for api in ("chat", "messages", "responses", "completions"):
        found = hints_of(api, body)
        assert all(hint.action in ACTIONS and (hint.ttl_s is None or hint.ttl_s >= 0) for hint in found.hints)
