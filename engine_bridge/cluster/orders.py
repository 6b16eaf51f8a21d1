"""What a gateway and the process that drives Ray for it say to each other: a line of JSON each, over a pair of sockets that nobody else can reach."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from engine_bridge.cluster.host import NodeAddress
from engine_bridge.cluster.trust import Trust


class NodeToStart(Struct, frozen=True, kw_only=True):
    """A node of this machine.

    settings: what `ClusterSettings.make_node` is called with. cores: it keeps to these; none: to all that there are. folder, turns: see
    `NodeHost`.
    """

    node_id: str
    settings: bytes
    folder: str
    cores: tuple[int, ...] = ()
    num_gpus: int = 0
    turns: str


class ClusterSettings(Struct, frozen=True, kw_only=True):
    """What the driving process is to do.

    address: of a Ray cluster that is there, host:port; empty: start one. host: what nodes, and a Ray that is started, listen on. port: where
    others join a Ray that is started; 0: any. folder: for Ray's own files, with a short path. make_node: `module:function`, which makes a node of
    its settings in the actor's process; the module's `load(node)` is what can be done before the node's turn to start.
    follows_all: tell of the nodes of others, too.
    """

    address: str
    host: str
    port: int = 0
    folder: str
    trust: Trust
    nodes: tuple[NodeToStart, ...]
    make_node: str
    follows_all: bool = True


class Order(Struct, frozen=True, tag_field="type", tag=str.lower):
    """From the gateway."""


class Begin(Order, frozen=True):
    settings: ClusterSettings


class Kill(Order, frozen=True):
    """It hangs: end its process at once, and start it again."""

    node_id: str


class Restart(Order, frozen=True):
    """Close it, and start it again."""

    node_id: str


class Remove(Order, frozen=True):
    """Close it for good."""

    node_id: str


class Close(Order, frozen=True):
    """Close all that was started here, and end."""


class News(Struct, frozen=True, tag_field="type", tag=str.lower):
    """To the gateway."""


class StartStage(News, frozen=True):
    """text: a phrase for people."""

    text: str


class Placed(News, frozen=True):
    """A node is there, or again. place: None while its process starts. problem: why the last attempt to start it failed, if it did."""

    node_id: str
    place: NodeAddress | None
    problem: str = ""


class NodeLeft(News, frozen=True):
    """A node is gone for good."""

    node_id: str


class ClusterFailed(News, frozen=True):
    """The cluster cannot be used, or no longer: the process ends."""

    problem: str


FromGateway = Begin | Kill | Restart | Remove | Close
FromDriver = StartStage | Placed | NodeLeft | ClusterFailed
_orders: msgspec.json.Decoder[FromGateway] = msgspec.json.Decoder(FromGateway)
_news: msgspec.json.Decoder[FromDriver] = msgspec.json.Decoder(FromDriver)


def line_of(message: Order | News) -> bytes:
    """A message as one line of JSON, as it goes through a pipe."""
    return msgspec.json.encode(message) + b"\n"


def order_of(line: bytes) -> FromGateway:
    """The gateway's message in this line. Raises `msgspec.DecodeError` for any other line."""
    return _orders.decode(line)


def news_of(line: bytes) -> FromDriver:
    """The driver process's message in this line. Raises `msgspec.DecodeError` for any other line."""
    return _news.decode(line)
