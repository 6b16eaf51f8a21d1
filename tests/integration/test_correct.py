"""The short form of `python -m bench.live.correct`: one family of models through all tiers, adapters, batches, conversations and a restart."""

from __future__ import annotations

import sys

import pytest

from bench.live.shared.report import last_line


@pytest.mark.slow
def test_answers_are_those_of_transformers_whatever_was_reused() -> None:
    found = last_line(sys.executable, "-m", "bench.live.correct", "--quick", timeout_s=280)
    assert found["cases"] >= 25
    assert found["notices_a_wrong_block"]
    names = ("wrong_tokens", "stale_kv_used", "without_evidence", "failed_plays")
    assert {name: found[name] for name in names} == dict.fromkeys(names, 0)
