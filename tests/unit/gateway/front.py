"""The whole gateway on a loopback port, in front of a node without a model; and a client of its chat socket, frame by frame."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import aiohttp
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from yarl import URL

from gateway.access.auth import KeyRing
from gateway.access.budgets import Gatekeeper, RequestBudgets
from gateway.advisories.learned import Learned
from gateway.app import Server
from gateway.metrics.nodes import NodeCollector
from gateway.nodes.known_nodes import OneNode
from gateway.nodes.maintenance import NodeMaintenance
from gateway.nodes.node_states import Nodes
from gateway.people.audit import NAME as AUDIT
from gateway.people.audit import AuditLog
from gateway.people.ledger import NAME as LEDGER
from gateway.people.ledger import Ledger
from gateway.people.oidc import OidcProvider
from gateway.people.sign_ins import SignIns
from gateway.people.usage import Usage
from gateway.services import Services
from gateway.sessions import SessionStore
from gateway.settings.config import Config

from .fake_node import PATIENCE_S
from .parts import Parts

Frame = dict[str, Any]


class Reply(NamedTuple):
    """Of the HTTP API. body: what its JSON says, or its text; None where it is empty. content: its bytes."""

    status: int
    body: Any
    headers: Mapping[str, str]
    content: bytes


def bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


class Gateway(Parts):
    """The whole gateway on a loopback port, on a fake node. clock_ahead_s: how much later it is for sign-ins."""

    clock_ahead_s = 0.0

    def __init__(self, store: SessionStore, config: Config) -> None:
        super().__init__(store, accepts_drafts=config.draft_prefill, config=config)
        learned = Learned(self.node, self.advisories, is_on=False)
        keys = KeyRing(config.api_keys, operator_keys=config.operator_keys, key_file=config.api_key_file)
        node: Any = self.node  # Services names the class that production has
        parts = (self.turns, keys, self.metrics, self.drafts, self.advisories, learned)
        self.usage = Usage(
            Ledger.open(config.data_dir / LEDGER),
            keys,
            self.metrics,
            max_tokens_per_day=config.max_tokens_per_day,
            by_user=config.metrics_by_user,
        )
        audit = AuditLog(config.data_dir / AUDIT)
        gatekeeper = Gatekeeper(keys, self.metrics, on_refused=audit.refused)
        bounds = (
            RequestBudgets.of(config, self.metrics, 64, keys),
            gatekeeper,
            self.usage,
            SignIns(self.usage.ledger, keys, lambda: time.time() + self.clock_ahead_s),
            audit,
        )
        self.nodes: Nodes = OneNode(node)
        maintenance = NodeMaintenance(self.nodes, config.drain_timeout_s)
        node_metrics = NodeCollector()
        self.metrics.registry.register(node_metrics)
        oidc = OidcProvider.of(config)
        services = Services(config, node, store, *parts, *bounds, maintenance, node_metrics, oidc=oidc)
        self.server = Server(services)

    async def call(
        self, method: str, path: str | URL, body: Any = None, *, key: str | None = None, **options: Any
    ) -> Reply:
        """Call the HTTP API, on a connection of its own. options: of aiohttp's `request`."""
        async with (
            aiohttp.ClientSession(self.server.url, headers=bearer(key)) as http,
            http.request(method, path, json=body, **options) as reply,
        ):
            content = await reply.read()
            is_json = reply.content_type == "application/json"
            text = json.loads(content) if is_json else content.decode(errors="replace") or None
            return Reply(reply.status, text, reply.headers, content)

    @contextlib.asynccontextmanager
    async def socket(
        self, *, key: str | None = None, hello: Frame | None = None, headers: dict[str, str] | None = None
    ) -> AsyncIterator[Socket]:
        url = self.server.url.replace("http", "ws") + "/ws"
        headers = bearer(key) | (headers or {})
        async with connect(url, additional_headers=headers, max_size=None, ping_interval=None) as raw:
            socket = Socket(raw)
            if hello is not None:
                await socket.send(type="hello", **hello)
                assert (await socket.next())["type"] == "ready"
            yield socket


class Socket:
    """One client's socket, frame by frame."""

    def __init__(self, raw: ClientConnection) -> None:
        self.raw = raw

    async def send(self, **frame: Any) -> None:
        await self.raw.send(json.dumps(frame))

    async def next(self) -> Frame:
        async with asyncio.timeout(PATIENCE_S):
            frame: Frame = json.loads(await self.raw.recv())
            return frame

    async def ask(self, name: str, content: str = "Hello!", **fields: Any) -> Frame:
        """The `accepted` (or `error`) of a message."""
        await self.send(type="message", id=name, content=content, **fields)
        return await self.next()

    async def rest(self, *, seq: int = 0) -> tuple[str, Frame]:
        """The text from here to the turn's end, and its last frame; `seq` must only grow."""
        text = ""
        while True:
            frame = await self.next()
            if frame["type"] != "delta":
                return text, frame
            assert frame["seq"] > seq, "seq only grows"
            seq = frame["seq"]
            text += frame["text"]

    async def closed(self) -> int:
        """The code with which the server closes; frames before it are passed over."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                while True:
                    await self.raw.recv()
            except ConnectionClosed as closed:
                assert closed.rcvd is not None, "cut off without a word"
                return closed.rcvd.code


Gateways = Callable[..., Awaitable[Gateway]]
