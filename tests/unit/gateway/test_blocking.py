"""The watch over the event loop sees what it is there for."""

from __future__ import annotations

import asyncio

import pytest
from blockbuster import BlockingError

from gateway.rest import _static_path
from tests.blocking import watched


async def test_code_of_ours_that_blocks_the_loop_is_noted_even_if_its_error_is_swallowed() -> None:
    with watched() as blocked, pytest.raises(BlockingError):
        _static_path("index.html")
    assert blocked.found and "gateway/rest.py" in blocked.found[0]


async def test_what_runs_in_a_thread_blocks_nobody() -> None:
    with watched() as blocked:
        assert await asyncio.to_thread(_static_path, "index.html") is not None
    assert not blocked.found


def test_without_a_loop_there_is_nothing_to_block() -> None:
    with watched() as blocked:
        assert _static_path("nothing") is None
    assert not blocked.found
