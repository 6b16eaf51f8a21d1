"""The watch over the event loop sees what it is there for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from gateway.doors.rest.pages import _static_path
from tests.blocking import watched

from .front import Gateways


async def test_code_of_ours_that_blocks_the_loop_is_noted_though_its_error_is_swallowed(
    gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await gateways()

    async def on_the_loop(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    monkeypatch.setattr("gateway.doors.rest.pages.asyncio.to_thread", on_the_loop)
    with watched() as blocked:
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{gateway.server.url}/static/index.html") as reply,
        ):
            assert reply.status == 500
    assert "_static_path" in blocked.found[0]


async def test_what_runs_in_a_thread_blocks_nobody(gateways: Gateways) -> None:
    gateway = await gateways()
    with watched() as blocked:
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{gateway.server.url}/static/index.html") as reply,
        ):
            assert reply.status == 200
    assert not blocked.found


async def test_what_a_test_calls_itself_is_its_own_affair() -> None:
    with watched() as blocked:
        assert _static_path("index.html") is not None
    assert not blocked.found


def test_without_a_loop_there_is_nothing_to_block() -> None:
    with watched() as blocked:
        assert _static_path("nothing") is None
    assert not blocked.found


async def test_a_coroutine_of_ours_that_a_test_awaits_is_watched(
    monkeypatch: pytest.MonkeyPatch, gateways: Gateways
) -> None:
    from gateway.app import build_services
    from gateway.settings.config import Config

    async def on_the_loop(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    gateway = await gateways()
    config: Config = gateway.server.services.config
    monkeypatch.setattr(asyncio, "to_thread", on_the_loop)
    with watched() as blocked, pytest.raises(Exception, match="Blocking call"):
        await build_services(config)
    assert any("prepare_data_dir" in line for line in blocked.found)
