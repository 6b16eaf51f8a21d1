"""Which node has a session's KV is stored with the end of each turn, and known again after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path
from typing import get_args

from prometheus_client import CollectorRegistry

from engine_bridge.policy.nodes.routing import POLICIES
from gateway.app import build_services
from gateway.metrics.metrics import Metrics
from gateway.nodes.adapter_sync import AdapterSync
from gateway.nodes.router import Router
from gateway.sessions import SessionStore
from gateway.settings.config import Config, RoutingChoice
from gateway.turns.protocol import Message
from tests.unit.gateway.nodes import TestPlacement, routed

NOW = 1_700_000_000.0


async def turn(store: SessionStore, session: str, name: str, home: str, now: float = NOW) -> None:
    await store.create_session("ann", session_id=session, exist_ok=True, now=now)
    await store.begin_turn("ann", session, name, "hello", now=now)
    await store.finish_turn("ann", session, name, answer="hi", status="done", home=home, now=now)


async def test_homes_are_those_of_the_last_turns_and_the_latest_session_comes_last(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    store = await SessionStore.open(path)
    await turn(store, "old", "a", "n1")
    await turn(store, "lost", "b", "n1", NOW + 1)
    await turn(store, "none", "c", "", NOW + 2)
    await turn(store, "moved", "d", "n1", NOW + 3)
    await turn(store, "moved", "e", "n2", NOW + 4)
    await turn(store, "moved", "f", "", NOW + 5)
    await store.delete("ann", "lost", NOW + 6)
    await store.close()
    store = await SessionStore.open(path)
    assert await store.homes(10) == [("ann", "old", "n1"), ("ann", "moved", "n2")]
    assert await store.homes(1) == [("ann", "moved", "n2")]
    await store.close()


async def test_sessions_of_a_file_of_version_2_have_no_home_yet_and_get_one(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    store = await SessionStore.open(path)
    await turn(store, "s", "a", "")
    await store.close()

    def back_to_version_2() -> None:
        with contextlib.closing(sqlite3.connect(path)) as conn:
            conn.execute("ALTER TABLE sessions DROP COLUMN home")
            conn.execute("DROP TABLE response_items")
            conn.execute("DROP TABLE responses")
            conn.execute("DROP TABLE tree")
            conn.execute("DROP TABLE session_settings")
            conn.execute("DROP INDEX sessions_pinned")
            conn.execute("ALTER TABLE sessions DROP COLUMN pinned_at")
            conn.execute("ALTER TABLE sessions DROP COLUMN origin")
            conn.execute("DROP TRIGGER turns_reasoning")
            conn.execute("DROP TRIGGER turns_delete_reasoning")
            conn.execute("ALTER TABLE turns DROP COLUMN reasoning")
            conn.execute("PRAGMA user_version = 2")
            conn.commit()

    await asyncio.to_thread(back_to_version_2)
    store = await SessionStore.open(path)
    assert await store.homes(10) == []
    await turn(store, "s", "b", "n1")
    assert await store.homes(10) == [("ann", "s", "n1")]
    await store.close()


async def test_a_gateway_over_several_nodes_stores_homes_and_knows_them_again(tmp_path: Path) -> None:
    config = Config(data_dir=tmp_path, port=0)
    async with routed("a", "b") as (router, placement):
        services = await build_services(config, node=router, metrics=Metrics(CollectorRegistry()))
        asked = await services.turns.ask("ann", Message(id="m1", content="hello"))
        (await placement.inner["a"].asked()).finish("hi")
        await services.turns.drain(10.0)
        await services.store.close()
    placement = TestPlacement("a", "b")
    again = Router(placement, AdapterSync(lambda: placement.nodes))
    services = await build_services(config, node=again, metrics=Metrics(CollectorRegistry()))
    assert again.home_of("ann", asked.session_id) == "a"
    await services.store.close()


def test_the_setting_has_every_policy() -> None:
    assert get_args(RoutingChoice) == ("auto", *POLICIES)
