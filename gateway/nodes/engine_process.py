"""The engine in a process of its own: what the gateway or Ray starts, and what that process does first."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from engine_bridge.cluster import host
from engine_bridge.cluster.guard import own_group
from engine_bridge.cluster.process import ProcessNode
from engine_bridge.driver.engine.building import configure_environment
from engine_bridge.local_node import LocalNode
from engine_bridge.settings.node_config import LocalNodeConfig
from gateway.settings import logs


class ChildSettings(Struct, frozen=True):
    """The settings that the process reads from its standard input before anything else."""

    node: LocalNodeConfig
    log_format: str
    log_level: str


def make_node(node: LocalNodeConfig, log_format: str, log_level: str) -> ProcessNode:
    """Return a node whose engine runs in a child process, which is not started yet."""
    command = (sys.executable, "-m", "gateway.nodes.engine_process")
    return ProcessNode(
        command, pack_settings(ChildSettings(node, log_format, log_level)), node.engine.model_names
    )


def pack_settings(settings: ChildSettings) -> bytes:
    """Return the child's settings as bytes for its standard input."""
    return msgspec.msgpack.encode(settings, enc_hook=str)


def read_settings(packed: bytes) -> ChildSettings:
    """Return the settings that `pack_settings` packed. Raises `msgspec.MsgspecError` for other bytes."""
    return msgspec.msgpack.decode(packed, type=ChildSettings, dec_hook=_as)


def _as(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"no {kind} is sent")


def make_local_node(packed: bytes) -> tuple[LocalNode, str]:
    """Return a node made of packed `ChildSettings`, in a process without an engine, and where other nodes may ask it for KV ("" for nowhere)."""
    settings = read_settings(packed)
    logs.setup(settings.log_format, settings.log_level)
    # Before anything imports torch: it reads its environment once.
    configure_environment(settings.node.engine)
    node = LocalNode(settings.node)
    return node, node.peer_address


def load(node: LocalNode) -> None:
    """Do what a node can do before its turn to start. Raises what importing raises."""
    node.load()


def main() -> None:
    """Serve a node on the socket that the gateway handed over, until the gateway ends."""
    own_group()
    node, peer_address = make_local_node(sys.stdin.buffer.read())
    host.serve(node, int(sys.argv[1]), peer_address)


if __name__ == "__main__":
    main()
