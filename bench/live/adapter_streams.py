"""Streams of the base model beside requests for cold adapters: what is asked, and the gaps that the streams then have."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from bench.live.peers.adapters import Ask
from bench.live.peers.play import text

STREAMS, STREAM_PROMPT_TOKENS, STREAM_TOKENS = 4, 32, 1000
COLD_ARRIVALS, FIRST_ARRIVAL_S, ARRIVAL_GAP_S, ARRIVAL_PROMPT_TOKENS, ARRIVAL_TOKENS = 4, 0.6, 0.25, 16, 4


def streams_and_arrivals(names: Sequence[str], repeat: int) -> list[Ask]:
    """Base streams from the start until all is over, and one request for each adapter."""
    streams = [
        Ask(
            at_s=0.0,
            prompt=text(STREAM_PROMPT_TOKENS, "stream", repeat, number),
            max_tokens=STREAM_TOKENS,
            is_background=True,
        )
        for number in range(STREAMS)
    ]
    arrivals = [
        Ask(
            at_s=FIRST_ARRIVAL_S + number * ARRIVAL_GAP_S,
            prompt=text(ARRIVAL_PROMPT_TOKENS, "arrival", repeat, number),
            max_tokens=ARRIVAL_TOKENS,
            adapter=name,
        )
        for number, name in enumerate(names)
    ]
    return streams + arrivals


def gaps_of(answers: Sequence[dict[str, Any]]) -> list[float]:
    """The base streams' inter-token gaps, in seconds, from the first arrival to the last arrival's end."""
    end_s = max(answer["token_s"][-1] for answer in answers[STREAMS:])
    gaps = []
    for answer in answers[:STREAMS]:
        times = answer["token_s"]
        gaps += [
            after - before
            for before, after in pairwise(times)
            if after >= FIRST_ARRIVAL_S and before <= end_s
        ]
    return gaps


def decode_rate(answers: Sequence[dict[str, Any]]) -> float:
    """Tokens per second while all of them decode."""
    start_s = max(answer["token_s"][0] for answer in answers)
    end_s = min(answer["token_s"][-1] for answer in answers)
    num_tokens = sum(start_s < at_s <= end_s for answer in answers for at_s in answer["token_s"])
    return num_tokens / (end_s - start_s)
