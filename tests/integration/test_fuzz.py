"""A short run of what `make fuzz` does: the API as its document says, whatever is sent."""

from __future__ import annotations

import asyncio

import pytest

from bench.fuzz.api import Round, Tally, Target, counted, run_round
from bench.fuzz.raw import cases, play

from .conftest import Gateways
from .facts import KEYS

EVERY_NTH = 8  # of the raw cases; chosen: some seconds


@pytest.mark.slow
async def test_schemathesis_finds_no_answer_that_the_document_lacks(gateways: Gateways) -> None:
    server = await gateways(operator_keys=KEYS[:1])  # who may read how many requests there were
    target, tally = Target(server.url, KEYS[0]), Tally()
    step = Round("a few bodies of each kind", 2)
    tally.add_report(await asyncio.to_thread(run_round, target, step, 1, "bench.fuzz.short_answers"))
    seen = await asyncio.to_thread(counted, target)
    assert seen.total() > 100
    assert not tally.failures
    assert not {entry: num for entry, num in seen.items() if entry[1] >= 500}


@pytest.mark.slow
async def test_malformed_requests_get_an_answer_that_blames_the_client(gateways: Gateways) -> None:
    server = await gateways(api_keys=KEYS, max_body_bytes=1 << 20)
    # The engine of the tests has room for long answers: nothing that takes the limit away.
    chosen = [case for case in cases(KEYS[0]) if not case.name.startswith("max_")][::EVERY_NTH]

    def play_all() -> list[tuple[str, int | None]]:
        outcomes = [play(server.port, case) for case in chosen]
        return [(outcome.case.name, outcome.status) for outcome in outcomes if not outcome.is_fine]

    assert await asyncio.to_thread(play_all) == []
