"""What a node has to do: what is counted as requests come and go, against looking at all of them."""

import pytest

from engine_bridge.core.scheduling.load import Counted, LoadTracker
from engine_bridge.protocol.node_facts import Ranks


def one(name: str, rank: int = 0, prefill: int = 100, **more: bool) -> Counted:
    """A prompt of 100 tokens, of which so many are to be computed; 50 are expected of its answer."""
    return Counted(name, rank, 100, prefill, 150, **more)


def test_what_waits_takes_its_prompt_and_what_runs_has_it() -> None:
    load = LoadTracker()
    load.waits(one("a", rank=8))
    load.waits(one("b", rank=16, prefill=20, is_urgent=True))
    load.runs(one("a", rank=8))
    facts = load.facts(held_tokens=110, num_free_tokens=1000)
    assert (facts.running, facts.queued) == (Ranks(1, 8, 8), Ranks(1, 16, 16))
    assert facts.num_tokens == 110 + 100, "what is held, and what the start of the other takes"
    assert facts.queued_tokens == 20, "what of its prompt is to be computed"
    assert facts.answer_tokens == 40 + 50, "ten tokens of the running one's answer are there"
    assert facts.free_tokens == 1000 - 100 - 90
    assert (facts.num_urgent, facts.node_id) == (1, "")


def test_usual_sizes_follow_what_is_seen() -> None:
    load = LoadTracker()
    for number in range(300):
        load.waits(one(str(number), prefill=40))
        load.runs(one(str(number), prefill=40))
        load.ended(str(number), num_answer_tokens=30)
    assert load.prompt_tokens == pytest.approx(40, rel=0.05)
    assert load.answer_tokens == pytest.approx(30, rel=0.1)
