"""Ends of connections: what both ends do with bytes, alike for `link.NodeLink` and `server.GatewayConnection`, and between peers."""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from typing import Any, cast

from engine_bridge.cluster import wire

log = logging.getLogger(__name__)


class StreamEnd(ABC, asyncio.BaseProtocol):
    """An end of a stream that writes only while the other end reads."""

    def __init__(self) -> None:
        self._can_write = asyncio.Event()
        self._can_write.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        """Let writers wait: the other end reads slowly."""
        self._can_write.clear()

    def resume_writing(self) -> None:
        """Let writers go on."""
        self._can_write.set()


class WireConnection(StreamEnd, asyncio.Protocol):
    """Cuts bytes into messages and hands each to `_take`. A fault ends the connection, and only this one.

    Args:
        direction: `wire.ToNode` or `wire.ToGateway`, the messages that the other end may send.
        other: the other end, for the log.
    """

    def __init__(self, direction: Any, other: str) -> None:
        super().__init__()
        self._frames, self._other = wire.Frames(direction), other
        self._nonce = secrets.token_bytes(wire.CHALLENGE_BYTES)

    def data_received(self, data: bytes) -> None:
        """Take the messages that are whole now."""
        try:
            for number, message in self._frames.feed(data):
                self._take(number, message)
        except wire.WireError as error:
            log.error("the connection to a %s is cut: %s", self._other, error)
            self._transport.abort()
        except Exception:
            log.exception("a message of a %s could not be taken; its connection is cut", self._other)
            self._transport.abort()

    @abstractmethod
    def _take(self, number: int, message: Any) -> None:
        """Handle one message. Raises WireError."""
