"""The engine in a process of its own: what the gateway or Ray starts, and what that process does first."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from engine_bridge.cluster import child
from engine_bridge.cluster.guard import own_group
from engine_bridge.cluster.process import ProcessNode
from engine_bridge.driver.engine.building import configure_environment
from engine_bridge.local_node import LocalNode, LocalNodeConfig
from gateway.settings import logs


class ChildSettings(Struct, frozen=True):
    """What the process reads before anything else."""

    node: LocalNodeConfig
    log_format: str
    log_level: str


def make_node(node: LocalNodeConfig, log_format: str, log_level: str) -> ProcessNode:
    """A node whose engine runs in a child process, which is not started yet."""
    command = (sys.executable, "-m", "gateway.nodes.engine_process")
    return ProcessNode(
        command, pack_settings(ChildSettings(node, log_format, log_level)), node.engine.served_model_name
    )


def pack_settings(settings: ChildSettings) -> bytes:
    """The child's settings as bytes for its standard input."""
    return msgspec.msgpack.encode(settings, enc_hook=str)


def read_settings(packed: bytes) -> ChildSettings:
    """The settings that `pack_settings` made. Raises `msgspec.MsgspecError` for other bytes."""
    return msgspec.msgpack.decode(packed, type=ChildSettings, dec_hook=_as)


def _as(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"no {kind} is sent")


def make_local_node(packed: bytes) -> tuple[LocalNode, str]:
    """Of packed `ChildSettings`, in a process that has no engine yet; and where other nodes may ask it for KV, "" for nowhere."""
    settings = read_settings(packed)
    logs.setup(settings.log_format, settings.log_level)
    # Before anything imports torch: it reads its environment once.
    configure_environment(settings.node.engine)
    node = LocalNode(settings.node)
    return node, node.peer_address


def load(node: LocalNode) -> None:
    """What a node can do before its turn to start comes. Raises what importing raises."""
    node.load()


def main() -> None:
    own_group()
    node, peer_address = make_local_node(sys.stdin.buffer.read())
    child.serve(node, int(sys.argv[1]), peer_address)


if __name__ == "__main__":
    main()
