"""Messages between a gateway and the process that drives Ray for it: a line of JSON each, over a private pair of sockets."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from engine_bridge.cluster.host import NodeAddress
from engine_bridge.cluster.trust import Trust


class NodeToStart(Struct, frozen=True, kw_only=True):
    """A node of this machine.

    settings: the argument of `ClusterSettings.make_node`. cores: the node keeps to these; none: to all cores. folder, turns: see `NodeHost`.
    """

    node_id: str
    settings: bytes
    folder: str
    cores: tuple[int, ...] = ()
    num_gpus: int = 0
    turns: str


class ClusterSettings(Struct, frozen=True, kw_only=True):
    """Orders for the whole life of the driving process.

    address: host:port of an existing Ray cluster; empty: start one. host: the address that nodes, and a Ray that is started, listen on. port: where
    others join a Ray that is started; 0: any. folder: for Ray's own files, with a short path. make_node: `module:function`, which makes a node of
    its settings in the actor's process; the module's `load(node)` does the work that needs no turn to start. follows_all: report the nodes of
    others, too.
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
    """Base of the gateway's messages."""


class Begin(Order, frozen=True):
    """The first message."""

    settings: ClusterSettings


class Kill(Order, frozen=True):
    """End the process of a hanging node at once, and start it again."""

    node_id: str


class Restart(Order, frozen=True):
    """Close a node, and start it again."""

    node_id: str


class Remove(Order, frozen=True):
    """Close a node for good."""

    node_id: str


class Close(Order, frozen=True):
    """Close all that was started here, and end."""


class News(Struct, frozen=True, tag_field="type", tag=str.lower):
    """Base of the driver's messages."""


class StartStage(News, frozen=True):
    """text: a phrase for people."""

    text: str


class Placed(News, frozen=True):
    """A node's address, None while its process starts. problem: why the last attempt to start it failed, if it did."""

    node_id: str
    place: NodeAddress | None
    problem: str = ""


class NodeLeft(News, frozen=True):
    """A node has ended for good."""

    node_id: str


class ClusterFailed(News, frozen=True):
    """The cluster cannot be used, or no longer: the process ends."""

    problem: str


FromGateway = Begin | Kill | Restart | Remove | Close
FromDriver = StartStage | Placed | NodeLeft | ClusterFailed
_orders: msgspec.json.Decoder[FromGateway] = msgspec.json.Decoder(FromGateway)
_news: msgspec.json.Decoder[FromDriver] = msgspec.json.Decoder(FromDriver)


def line_of(message: Order | News) -> bytes:
    """Encode a message as one line of JSON."""
    return msgspec.json.encode(message) + b"\n"


def order_of(line: bytes) -> FromGateway:
    """Decode the gateway's message in this line. Raises `msgspec.DecodeError` for any other line."""
    return _orders.decode(line)


def news_of(line: bytes) -> FromDriver:
    """Decode the driver's message in this line. Raises `msgspec.DecodeError` for any other line."""
    return _news.decode(line)
