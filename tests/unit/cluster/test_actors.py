import asyncio
import os
import socket
import stat
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine_bridge.cluster import actors, orders
from engine_bridge.cluster.host import NodeAddress
from engine_bridge.cluster.orders import ClusterSettings, NodeToStart
from engine_bridge.cluster.trust import Trust
from tests.unit.cluster.catalog_node import PATIENCE_S, until

TRUST = Trust(token=b"of this cluster")


class RayError(Exception):
    """As Ray's, of which the others are kinds."""


class ActorDiedError(RayError):
    pass


class ActorUnavailableError(RayError):
    pass


class Actor:
    """An actor's handle. errors: what its `where` raises before it answers, the next one first."""

    def __init__(self, name: str, number: int, *errors: Exception | bytes) -> None:
        self.name, self.number, self.is_dead = name, number, False
        self._answers = list(errors)
        self.where = SimpleNamespace(remote=self._where)
        self.close = self.leave = SimpleNamespace(remote=lambda: asyncio.sleep(0))

    async def _where(self) -> bytes:
        if self.is_dead:
            raise ActorDiedError("it was killed")
        answer = self._answers.pop(0) if self._answers else self._place()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _place(self) -> bytes:
        place = {"host": "127.0.0.1", "port": 4000 + self.number, "incarnation": f"{self.name}-{self.number}"}
        return msgspec.json.encode(NodeAddress(**place, pid=1 << 30))


class Ray(ModuleType):
    """As much of Ray as the driver uses. faults: what the first actor of each name does. others: actors that somebody else made."""

    def __init__(self, **faults: Any) -> None:
        super().__init__("ray")
        self.faults, self.made = faults, {}
        self.others: dict[str, Actor] = {}
        self.num_failing_looks = 0
        self.exceptions = SimpleNamespace(
            RayError=RayError, ActorDiedError=ActorDiedError, ActorUnavailableError=ActorUnavailableError
        )
        self.util = SimpleNamespace(list_named_actors=self._names)

    def init(self, **options: Any) -> None: ...

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "raylet")

    def remote(self, made: type) -> Any:
        return self

    def options(self, *, name: str, **options: Any) -> Any:
        return SimpleNamespace(remote=lambda path: self._make(name.removeprefix(actors.PREFIX)))

    def _make(self, name: str) -> Actor:
        number = self.made[name].number + 1 if name in self.made else 0
        if number and not self.made[name].is_dead:
            raise ValueError(f"the name {name} is taken")
        actor = self.made[name] = Actor(name, number, *(() if number else self.faults.get(name, ())))
        return actor

    def kill(self, actor: Actor, *, no_restart: bool) -> None:
        actor.is_dead = True

    def _names(self) -> list[str]:
        if self.num_failing_looks:
            self.num_failing_looks -= 1
            raise RayError("the cluster's table cannot be read")
        return [actors.PREFIX + name for name in (*self.made, *self.others)]

    def get_actor(self, name: str) -> Actor:
        return self.others[name.removeprefix(actors.PREFIX)]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaves(code: int) -> None:
        raise AssertionError("the process ended, and with it all nodes of this machine")

    monkeypatch.setattr(actors, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(actors, "PAUSE_S", 0.01)
    monkeypatch.setattr(os, "_exit", leaves)


def settings_of(folder: Path, **others: Any) -> ClusterSettings:
    made: dict[str, Any] = {"address": "", "host": "127.0.0.1", "folder": str(folder), "trust": TRUST}
    return ClusterSettings(**made | {"nodes": (), "make_node": ""} | others)


@asynccontextmanager
async def driven(
    ray: Ray, folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str, follows_all: bool = False
) -> AsyncIterator[tuple[list[orders.News], Callable[[orders.Order], None]]]:
    """The news of a driver with these nodes, and what gives it orders."""
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda *args, **kwargs: None)
    modules = {"ray": ray, "ray.exceptions": ray.exceptions, "ray.util": ray.util}
    for name, module in (modules | {"ray.util.scheduling_strategies": strategies}).items():
        monkeypatch.setitem(sys.modules, name, module)
    place = {"settings": b"", "folder": str(folder), "turns": str(folder / "turns")}
    nodes = tuple(NodeToStart(node_id=name, **place) for name in names)
    settings = settings_of(folder, nodes=nodes, follows_all=follows_all)
    news: list[orders.News] = []
    driver = actors._Driver(settings, news.append)
    ours, theirs = socket.socketpair()
    with ours, theirs, theirs.makefile("rb") as lines:
        running = asyncio.create_task(driver.run(lines))
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield news, lambda order: ours.sendall(orders.line_of(order))
        finally:
            # Also the end of the thread that reads orders, which holds on to `lines`.
            ours.close()
            async with asyncio.timeout(PATIENCE_S):
                await running


def places(news: list[orders.News], name: str) -> list[str | None]:
    """Where a node was said to be, by its incarnations."""
    placed = [each for each in news if isinstance(each, orders.Placed) and each.node_id == name]
    return [each.place.incarnation if each.place is not None else None for each in placed]


FAULTS: dict[str, Exception | bytes] = {
    "raises": RayError("its code raised"),
    "odd": RuntimeError("unpickled"),  # of no kind of Ray's
    "older": b'{"host": "127.0.0.1"}',  # a place of another version
    "endless": RuntimeError("x" * 100_000),
}


async def test_nodes_that_err_return_and_end_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of others is asked again, and is gone once it is not named any more."""
    ray = Ray(**{name: [fault] for name, fault in FAULTS.items()})
    ray.others["foreign"] = Actor("foreign", 7, b"what is this?", RayError("its code raised"))
    ray.num_failing_looks = 2
    async with driven(ray, tmp_path, monkeypatch, "good", *FAULTS, follows_all=True) as (news, _):
        await until(lambda: all(f"{name}-1" in places(news, name) for name in FAULTS))
        await until(lambda: "foreign-7" in places(news, "foreign") and "good-0" in places(news, "good"))
        for name in FAULTS:
            told = [each.problem for each in news if isinstance(each, orders.Placed) and each.node_id == name]
            (problem,) = filter(None, told)
            assert len(problem) <= actors.MAX_PROBLEM_CHARS
        ray.others.pop("foreign").is_dead = True
        await until(lambda: orders.NodeLeft("foreign") in news)
        assert places(news, "good") == [None, "good-0"] and ray.made["good"].number == 0
        assert not [each for each in news if isinstance(each, orders.ClusterFailed)]


async def test_an_order_that_fails_ends_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = asyncio.Event()

    def refuses(pid: int, number: int) -> None:
        refused.set()
        raise PermissionError("of another user")

    async with driven(Ray(), tmp_path, monkeypatch, "a", "b") as (news, obey):
        await until(lambda: "a-0" in places(news, "a") and "b-0" in places(news, "b"))
        monkeypatch.setattr(os, "kill", refuses)
        obey(orders.Kill("a"))
        await refused.wait()
        obey(orders.Remove("b"))
        await until(lambda: orders.NodeLeft("b") in news)
        assert places(news, "a") == [None, "a-0"]
        assert not [each for each in news if isinstance(each, orders.ClusterFailed)]


def environment(folder: Path, given: dict[str, str] | None = None, **settings: Any) -> dict[str, str]:
    return actors.environment_of(settings_of(folder, **settings), given or {})


def test_a_ray_of_our_own_is_on_loopback_or_speaks_tls_and_others_keep_theirs(tmp_path: Path) -> None:
    """Its token is in a file of its owner and tells nothing of ours."""
    tls = Trust(token=TRUST.token, cert="c.crt", key="c.key")
    alone, beyond = environment(tmp_path), environment(tmp_path, host="10.0.0.1", port=6379, trust=tls)
    assert alone["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0" and "RAY_USE_TLS" not in alone
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in beyond and beyond["RAY_GCS_SERVER_PORT"] == "6379"
    names = ("RAY_USE_TLS", "RAY_TLS_SERVER_CERT", "RAY_TLS_CA_CERT")
    assert [beyond[name] for name in names] == ["1", "c.crt", "c.crt"]
    for given in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS"):  # of a cluster that others run
        found = environment(tmp_path, {given: "1"}, address="10.0.0.1:6379", host="10.0.0.2", trust=tls)
        assert not {name for name in found if name.startswith(("RAY_AUTH_", "RAY_USE_TLS", "RAY_TLS"))}
    path = Path(alone["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    token = path.read_text()
    assert len(token) == 64 and TRUST.token.decode() not in token and TRUST.token.hex() not in token
    other = tmp_path / "b"
    other.mkdir()
    assert Path(environment(other)["RAY_AUTH_TOKEN_PATH"]).read_text() == token, "on all machines the same"
