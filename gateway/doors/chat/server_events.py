"""The chat socket where no websocket gets through: frames to the page as server-sent events, frames from it as requests.

Some proxies strip the `Upgrade` header, and some let an upgraded connection hang. An `EventStream` has the methods of a websocket, so the
connection (`gateway.doors.chat.socket.ChatConnection`) is the same one. Source: docs/protocol.md, "Without websockets"; WHATWG HTML,
"Server-sent events".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from typing import Final

from aiohttp import ClientConnectionError, WSMessage, WSMsgType, web

from gateway.doors.chat.socket import GREETING_BYTES, HARD_FRAME_BYTES, MAX_QUEUED_BYTES, make_room, serve
from gateway.doors.chat.websocket import MessageTooLarge
from gateway.errors import GatewayError
from gateway.services import SERVICES

BEAT_S: Final = 15.0  # Chosen: many proxies close a connection after 30 s or a minute of silence.
MAX_WAITING: Final = 64  # Chosen: frames that wait to be read; a page sends a few each second.

STREAMS: Final = web.AppKey("event_streams", dict[str, "EventStream"])


class EventStream:
    """One page's connection. limit_bytes: of a frame from it."""

    def __init__(self, response: web.StreamResponse, limit_bytes: int) -> None:
        self.id = secrets.token_urlsafe(24)
        """Who knows this may send frames: only the page that opened the stream is told."""
        self.limit_bytes = limit_bytes
        self._response = response
        self._inbox: asyncio.Queue[WSMessage | None] = asyncio.Queue(MAX_WAITING)
        self._num_waiting_chars = 0
        self._is_closed = False

    def set_limits(self, limit_bytes: int, hard_limit_bytes: int) -> None:
        """Change the limits of later frames. A frame is a request, so a frame over either limit only gets an error."""
        self.limit_bytes = limit_bytes

    def put(self, text: str | None) -> None:
        """Queue a frame of the page; None stands in for a frame that was too large. Raises GatewayError `rate_limited` if too many wait."""
        if self._inbox.full() or self._num_waiting_chars > MAX_QUEUED_BYTES:
            raise GatewayError(
                "rate_limited", "Too many frames are waiting: send this one again.", retry_after_s=1.0
            )
        if text is None:
            large = MessageTooLarge(f"A frame may have {self.limit_bytes} bytes at most.")
            self._inbox.put_nowait(WSMessage(WSMsgType.ERROR, large, None))
        else:
            self._num_waiting_chars += len(text)
            self._inbox.put_nowait(WSMessage(WSMsgType.TEXT, text, None))

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> WSMessage:
        while not self._is_closed:
            try:
                async with asyncio.timeout(BEAT_S):
                    message = await self._inbox.get()
            except TimeoutError:
                with contextlib.suppress(ConnectionError, ClientConnectionError, RuntimeError):
                    await self._response.write(b": still here\n\n")
                    continue
                break  # the page has disconnected
            if message is None:
                break
            if message.type is WSMsgType.TEXT:
                self._num_waiting_chars -= len(message.data)
            return message
        raise StopAsyncIteration

    async def send_frame(self, frame: bytes, kind: WSMsgType) -> None:
        """Send one frame, which is JSON on one line. Raises ConnectionError when the page has disconnected."""
        await self._response.write(b"data: " + frame + b"\n\n")

    async def greet(self) -> None:
        """Tell the page where to send its frames."""
        await self._response.write(b"event: stream\ndata: " + json.dumps({"id": self.id}).encode() + b"\n\n")

    async def close(self, *, code: int, message: bytes) -> None:
        """Send the reason and end. Frames of the page that were not read are dropped."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._inbox.full():
            self._inbox.get_nowait()
        self._inbox.put_nowait(None)
        said = json.dumps({"code": code, "reason": message.decode()}).encode()
        await self._response.write(b"event: close\ndata: " + said + b"\n\n")


async def open_stream(request: web.Request) -> web.StreamResponse:
    """Handle `GET /sse`: send a chat socket's frames as events. The first event says where the page sends its own frames."""
    services = request.app[SERVICES]
    if not make_room(request):
        raise GatewayError("overloaded", "Too many pages are connected.", retry_after_s=3.0)
    headers = {
        "Content-Type": "text/event-stream; charset=utf-8",
        "Cache-Control": "no-store",
        "X-Accel-Buffering": "no",
        "X-Content-Type-Options": "nosniff",
    }
    response = web.StreamResponse(headers=headers)
    response.force_close()
    try:
        await response.prepare(request)
    except ConnectionError:  # the page has left already, as in `chat_socket`
        return response
    stream = EventStream(response, min(GREETING_BYTES, services.config.max_frame_bytes))
    streams = request.app[STREAMS]
    streams[stream.id] = stream
    try:
        with contextlib.suppress(ConnectionError, ClientConnectionError):
            await stream.greet()
            await serve(stream, request)
    finally:
        del streams[stream.id]
    return response


async def take_frame(request: web.Request) -> web.Response:
    """Handle `POST /sse/{id}`: take one frame of the page, as it would be sent on the socket. The answer comes as events."""
    stream = request.app[STREAMS].get(request.match_info["id"])
    if stream is None:
        raise GatewayError("not_found", "This stream has ended: open another.")
    stream.put(await _text(request, min(stream.limit_bytes, HARD_FRAME_BYTES)))
    return web.Response(status=204)


async def _text(request: web.Request, limit_bytes: int) -> str | None:
    """Return the body, or None for one over the limit. Raises GatewayError for bytes that are not text."""
    body = bytearray()
    while len(body) <= limit_bytes and (chunk := await request.content.read(limit_bytes + 1 - len(body))):
        body += chunk
    if len(body) > limit_bytes:
        return None
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise GatewayError("bad_request", "Frames must be UTF-8.") from error


def add_routes(app: web.Application) -> None:
    """Adds the chat socket's way without websockets."""
    app[STREAMS] = {}
    app.add_routes([web.get("/sse", open_stream), web.post("/sse/{id}", take_frame)])
