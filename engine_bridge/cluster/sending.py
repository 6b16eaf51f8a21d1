"""Sends adapters' files from a gateway to its nodes: by content, so that a node is sent only files that it lacks."""

from __future__ import annotations

import asyncio
import logging

from engine_bridge.adapters.contents import AdapterContents, read_piece
from engine_bridge.adapters.errors import AdapterRejected
from engine_bridge.adapters.store import MAX_PIECE_BYTES
from engine_bridge.cluster.remote_node import RemoteNode

log = logging.getLogger(__name__)

# A damaged transfer is repeated once; a second one is no accident.
TRIES = 2


async def bring(node: RemoteNode, contents: AdapterContents) -> str:
    """Bring an adapter's files to a node's machine, and return their path there. Answers go on meanwhile: one piece is under way at a time.

    Raises AdapterRejected for files that have changed, InvalidRequest for a full disk, EngineUnavailable.
    """
    path: str = await node.store("find", contents.content_hash, str(contents.path))
    for _ in range(TRIES):
        if path:
            return path
        await node.store("begin", contents.content_hash, contents.sizes)
        try:
            for name, size in contents.sizes.items():
                await _send(node, contents, name, size)
        except AdapterRejected as error:
            raise AdapterRejected(
                "The adapter's files are no longer where it was loaded from. Load it again.", code="changed"
            ) from error
        path = await node.store("finish", contents.content_hash)
    if path:
        return path
    raise AdapterRejected("The adapter's files changed while they were sent. Load it again.", code="changed")


async def _send(node: RemoteNode, contents: AdapterContents, name: str, size: int) -> None:
    for offset in range(0, size, MAX_PIECE_BYTES):
        num_bytes = min(MAX_PIECE_BYTES, size - offset)
        piece = await asyncio.to_thread(read_piece, contents.path, name, offset, num_bytes)
        if not piece:
            return
        await node.store("put", contents.content_hash, name, offset, piece)
