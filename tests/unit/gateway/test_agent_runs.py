"""What agents' runs have cost: turns, pauses, and what became of their prompts' KV."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.protocol.node import CallFigures, KvSources
from gateway.recognition.recognition import Recognition
from gateway.recognition.runs import (
    MAX_RUNS_OF_ONE,
    MAX_SHOWN,
    AgentRun,
    AgentRuns,
    PromptTokens,
    prompt_tokens,
)
from gateway.turns.replies import AnswerReader

from .parts import Clock, Parts


def figures(num_answer: int = 0, **kv: int) -> CallFigures:
    return CallFigures(KvSources(**{"device": 0, "host": 0, "disk": 0, "recomputed": 0, **kv}), num_answer)


def turn(
    runs: AgentRuns, cost: CallFigures | None, *, calls_tools: bool = True, session: str = "s", **asked: Any
) -> PromptTokens:
    """One call and its answer, at second 0."""
    runs.asked("ann", session, 0.0, **{"offers_tools": True, **asked})
    return runs.answered("ann", session, 0.0, cost, calls_tools=calls_tools)


def only(runs: AgentRuns) -> AgentRun:
    (run,) = runs.of("ann", 0.0)
    return run


def test_each_turn_is_told_apart_by_what_the_one_before_has_computed() -> None:
    runs = AgentRuns()
    # A system prompt that another session has computed is on the device; the rest is new.
    assert turn(runs, figures(20, device=64, recomputed=936)) == PromptTokens(stayed=64, new=936)
    # 1,020 tokens are known: 960 stayed, of the 60 others nothing was found.
    assert turn(runs, figures(20, device=960, recomputed=140), pause_s=1.5) == PromptTokens(960, 0, 60, 80)
    assert turn(runs, figures(20, device=32, host=500, disk=300, peer=100, recomputed=268)) == PromptTokens(
        32, 900, 188, 80
    )
    run = only(runs)
    assert run.tokens == PromptTokens(1056, 900, 248, 1096)
    assert (run.num_turns, run.num_pauses, run.pause_s, run.state) == (3, 1, 1.5, "tools")


def test_a_history_that_was_replaced_is_new() -> None:
    for shorter, asked in ((400, {}), (1500, {"is_rewritten": True})):
        runs = AgentRuns()
        turn(runs, figures(device=0, recomputed=1000))
        assert turn(runs, figures(recomputed=shorter), **asked) == PromptTokens(new=shorter)


def test_a_call_that_failed_changes_nothing_of_what_is_known() -> None:
    runs = AgentRuns()
    turn(runs, figures(recomputed=1000))
    assert turn(runs, None) == PromptTokens()
    assert turn(runs, figures(recomputed=1000)) == PromptTokens(recomputed=1000)


def test_only_sessions_that_have_called_tools_are_runs() -> None:
    runs = AgentRuns()
    turn(runs, figures(recomputed=10), session="chat", offers_tools=False, calls_tools=False)
    assert turn(runs, figures(recomputed=10), session="offers", calls_tools=False) == PromptTokens()
    assert runs.of("ann", 0.0) == []
    assert turn(runs, figures(recomputed=12), session="offers") == PromptTokens(recomputed=10, new=2)
    assert only(runs).tokens == PromptTokens(recomputed=10, new=12), "with its turns before that"
    assert runs.of("bob", 0.0) == []


def test_a_run_says_whether_it_asks_waits_for_its_tools_or_rests_and_since_when() -> None:
    runs, states = AgentRuns(), []

    def look(now: float) -> None:
        (run,) = runs.of("ann", now)
        states.append((run.state, run.age_s, run.quiet_s))

    turn(runs, figures(recomputed=1))
    look(2.0)
    runs.asked("ann", "s", 3.0, offers_tools=True)
    look(4.0)
    runs.answered("ann", "s", 5.0, figures(), calls_tools=False)
    look(7.0)
    assert states == [("tools", 2.0, 2.0), ("asks", 4.0, 1.0), ("rests", 7.0, 2.0)]


def test_it_is_bounded_and_long_names_are_cut() -> None:
    runs = AgentRuns()
    for number in range(MAX_RUNS_OF_ONE + 10):
        turn(runs, figures(recomputed=1), session=f"{number}-" + 200 * "x")
    shown = runs.of("ann", 0.0)
    assert len(shown) == MAX_SHOWN and shown[0].session_id.startswith(f"{MAX_RUNS_OF_ONE + 9}-")
    assert {len(run.session_id) for run in shown} == {64} and shown[0].session_id.endswith("…")
    assert sum(len(own) for own in runs._owners.values()) == MAX_RUNS_OF_ONE
    # A call that was forgotten meanwhile ends without a trace.
    assert (
        runs.answered("ann", "0-" + 200 * "x", 0.0, figures(recomputed=1), calls_tools=True) == PromptTokens()
    )


@given(*(st.integers(0, 5000) for _ in range(6)))
def test_all_tokens_of_a_prompt_are_counted_once(
    device: int, host: int, disk: int, peer: int, recomputed: int, num_known: int
) -> None:
    kv = KvSources(device, host, disk, recomputed, peer)
    found = prompt_tokens(kv, num_known)
    assert min(found.stayed, found.restored, found.recomputed, found.new) >= 0
    assert (
        found.stayed + found.restored + found.recomputed + found.new
        == device + host + disk + peer + recomputed
    )


async def test_a_loop_is_a_run_with_its_pauses_and_its_tokens_are_counted(parts: Parts) -> None:
    clock = Clock()
    tools = Recognition(parts.advisories, parts.metrics, clock)
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "go"}], "tools": [{}]}
    for number in range(2):
        asked = await tools.began("ann", "chat", {}, body, None, "", is_named=False)
        reader = AnswerReader("chat")
        reader.is_complete, reader.tools = True, {"c1": "bash"} if not number else {}
        reader.figures = figures(4, device=100 * number, recomputed=100)
        tools.ended(asked, reader)
        clock.now_s += 2.0
        body["messages"] += [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        ]
    (run,) = tools.runs.of("ann", clock())
    assert (run.num_turns, run.num_pauses, run.pause_s, run.state) == (2, 1, 2.0, "rests")
    assert run.tokens == PromptTokens(stayed=100, recomputed=4, new=196)
    for outcome, num_tokens in {"stayed": 100, "restored": 0, "recomputed": 4, "new": 196}.items():
        assert parts.count("overture_agent_run_tokens_total", outcome=outcome) == num_tokens
