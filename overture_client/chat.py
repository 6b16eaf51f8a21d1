"""Client of the chat socket (docs/protocol.md): many questions at once on one socket that mends itself.

    async with ChatClient("http://127.0.0.1:8000") as client:
        async for event in client.ask("Hello"):
            if isinstance(event, Delta):
                print(event.text, end="")

A dropped socket is opened again and every answer continues where it stopped: no text is lost and none comes twice. The decisions about one
answer (`chat_question`) are kept apart from the socket, so they can be tested without one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec
from msgspec import UNSET, Struct, UnsetType
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from overture_client.chat_frames import (
    Accepted,
    ChatError,
    Delta,
    Done,
    ErrorFrame,
    Event,
    Hello,
    Message,
    Ready,
    Session,
    Stop,
    Typing,
    decoder,
    encoder,
    without_halves,
)
from overture_client.chat_http import call_api
from overture_client.chat_question import Question

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 16 * 1024 * 1024  # docs/protocol.md, close code 1009
STARTING_POLL_S = 0.25  # chosen: an engine start takes seconds
FIRST_BACKOFF_S = 0.1  # chosen; doubled at each failure, up to MAX_BACKOFF_S, with jitter so that clients do not come in step
MAX_BACKOFF_S = 5.0
PING_EVERY_S = PONG_WITHIN_S = 10.0  # chosen: a dead line shows within 20 s
CLOSE_FLUSH_S = 0.5  # chosen: what waits to be sent is a few small frames
MAX_RESUMED_TURNS = 64  # in one hello; more go in further ones
CLOSE_UNAUTHORIZED = 4401

Status = Literal["connecting", "starting", "connected", "reconnecting"]


def socket_url(url: str) -> str:
    """Return the chat socket's address for a server's address: `http://host:8000` gives `ws://host:8000/ws`. Raises ValueError."""
    if url.startswith("unix:"):
        raise ValueError(
            f"{url} is a Unix socket, which this client does not speak to: have the server listen on a port, or a proxy pass it on"
        )
    if "//" not in url:
        url = f"http://{url}"
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(parts.scheme)
    if scheme is None or not parts.hostname:
        raise ValueError(
            f"not the address of a server: {url!r} (expected something like http://127.0.0.1:8000)"
        )
    path = parts.path.rstrip("/")
    return urlunsplit((scheme, parts.netloc, path if path.endswith("/ws") else f"{path}/ws", "", ""))


class ChatClient:
    """A connection to a gateway's chat socket. Use it as an async context manager; one event loop, any number of tasks.

    Args:
        url: the server's address (http, https, ws or wss).
        patience_s: how long to try when the server cannot be reached, at first or after a drop.
        starting_patience_s: how long to wait for a server that says that its engine is starting.
        on_status: is told about changes of the connection, with the server's own words if it gave any.

    Raises:
        ChatError: on entering, if the server is out of reach or refuses.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        patience_s: float = 30.0,
        starting_patience_s: float = 900.0,
        on_status: Callable[[Status, str], None] | None = None,
    ) -> None:
        self._url = socket_url(url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._patience_s = patience_s
        self._starting_patience_s = starting_patience_s
        self._on_status = on_status or (lambda status, detail: None)
        self._turns: dict[str, Question] = {}
        self._outbox: asyncio.Queue[Struct] | None = None  # None: no socket that the server has greeted
        self._opening: asyncio.Future[Session] | None = None
        self._opening_lock = asyncio.Lock()
        self._greeted = asyncio.Event()
        self._failure: ChatError | None = None
        self._ready = Ready()
        self._reached_at_s = 0.0
        self._starting_since_s: float | None = None
        self._runner: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._runner = asyncio.create_task(self._run(), name="chat-client")
        try:
            await self._greeted.wait()
        except asyncio.CancelledError:
            await self.close()
            raise
        if self._failure:
            await self.close()
            raise self._failure
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the socket. Answers still under way fail with code `unreachable`."""
        if self._outbox is not None:
            # A last `stop` should still get out.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_FLUSH_S):
                    await self._outbox.join()
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        self._fail(ChatError("unreachable", "the client was closed"))

    @property
    def ready(self) -> Ready:
        """The last greeting: models on offer and facts about the server."""
        return self._ready

    async def open_session(self, session_id: str) -> Session:
        """Return the session with its turns. Raises ChatError `not_found`, or `unreachable` if the socket drops meanwhile."""
        async with self._opening_lock:
            self._check_alive()
            self._opening = asyncio.get_running_loop().create_future()
            if not self._put(Hello(session_id=session_id)):
                raise ChatError("unreachable", "no connection to the server at the moment", retryable=True)
            return await self._opening

    async def choose_version(self, session_id: str, turn_id: str) -> Session:
        """Show another version of a message, one of its `Turn.versions`, with the turns last shown after it.

        Return the session as it is shown then.

        Raises ChatError: `not_found`, `busy` while an answer of the session is written, `unreachable`.
        """
        path = f"/api/sessions/{quote(session_id, safe='')}/choose"
        reply = await asyncio.to_thread(call_api, self._url, path, self._headers, {"turn_id": turn_id})
        return msgspec.json.decode(reply, type=Session)

    async def ask(
        self,
        content: str,
        *,
        session_id: str | None = None,
        adapter: str | None | UnsetType = UNSET,
        sampling: Mapping[str, Any] | None = None,
        after: str | None | UnsetType = UNSET,
        turn_id: str | None = None,
        continues: bool = False,
        pictures: Sequence[str] = (),
    ) -> AsyncGenerator[Event, None]:
        """Ask, and yield `Accepted`, `Delta`s and `Done`; in rare cases `Restarted`, see there.

        Leaving the iteration early stops the answer at once if the generator is closed (`contextlib.aclosing`).

        Args:
            content: the question.
            session_id: without it the server makes a session, which `Accepted` names.
            adapter: None is the base model; if left out, the session's last one stays.
            sampling: options such as `temperature` and `max_tokens`.
            after: the turn that the question follows (None: it is the first); the turns that followed that turn before are kept as another
                version.
            turn_id: makes asking again safe: the server answers an id once.
            continues: the answer of `turn_id` was cut (by its limit of tokens, or stopped) and is to go on; it comes from its beginning.
            pictures: ids of pictures that `POST /api/pictures` has stored.

        Raises:
            ChatError: the question failed.
        """
        self._check_alive()
        message = Message(
            id=turn_id or str(uuid.uuid4()),
            content=without_halves(content),
            session_id=session_id or UNSET,
            adapter=adapter,
            sampling=sampling or UNSET,
            after=after,
            continues=continues or UNSET,
            pictures=list(pictures) or UNSET,
        )
        if len(encoder.encode(message)) > MAX_FRAME_BYTES:
            raise ChatError("frame_too_large", f"the message is longer than {MAX_FRAME_BYTES} bytes")
        if message.id in self._turns:
            raise ChatError("conflict", f"turn {message.id} is already under way on this client")
        turn = self._turns[message.id] = Question(message)
        self._send_message(turn)
        is_over = False
        try:
            while not is_over:
                event = await turn.news.get()
                is_over = isinstance(event, Done | ChatError)
                if isinstance(event, ChatError):
                    raise event
                yield event
        finally:
            del self._turns[message.id]
            if not is_over:
                self._put(Stop(message.id))

    async def stop(self, turn_id: str) -> None:
        """End an answer now; its `ask` still yields `Done`, with `finish_reason` "stopped". Unknown ids are ignored."""
        turn = self._turns.get(turn_id)
        if turn is not None:
            # Also where it could be sent: a socket that is about to break may lose it.
            turn.is_stop_wanted = True
            self._put(Stop(turn_id))

    async def typing(
        self, session_id: str, *, adapter: str | None | UnsetType = UNSET, draft: str | UnsetType = UNSET
    ) -> None:
        """Tell the server that the user is about to ask. Advice only: dropped while there is no connection."""
        self._put(Typing(session_id, adapter, without_halves(draft) if isinstance(draft, str) else draft))

    # Sending. Frames go through a queue to one writer, so that nothing here waits for a slow network.

    def _put(self, frame: Struct) -> bool:
        """Send `frame`; return False if there is no greeted socket."""
        if self._outbox is None:
            return False
        self._outbox.put_nowait(frame)
        return True

    def _send_message(self, turn: Question) -> None:
        turn.is_sent = self._put(turn.message) or turn.is_sent
        if turn.is_stop_wanted:
            self._put(Stop(turn.message.id))

    def _send_again(self, turn: Question) -> None:
        """Run the later half of a delayed retry, if the answer is still waited for."""
        if self._turns.get(turn.message.id) is turn:
            self._send_message(turn)

    # The connection: one task that opens it, reads it, and opens it again.

    async def _run(self) -> None:
        """Run the client's one task: serve sockets until an error that no new socket mends, then end all waiting calls."""
        try:
            self._fail(await self._serve_sockets())
        except Exception as error:
            logger.exception("the chat client failed")
            self._fail(ChatError("internal", f"the client failed: {error!r}"))

    async def _serve_sockets(self) -> ChatError:
        """Open a socket, serve it, open it again; return the error that no new socket would mend."""
        loop = asyncio.get_running_loop()
        self._reached_at_s = loop.time()
        self._on_status("connecting", "")
        num_failures = 0
        while True:
            error = await self._connect_once()
            if self._outbox is not None:
                self._on_status("reconnecting", "")
                num_failures = 0
                # Patience begins with the loss: a chat may have been idle, or its server have stood still, for longer than that.
                self._reached_at_s = loop.time()
            self._detach()
            failure = self._failure or _final_failure(
                self._url, error, loop.time() - self._reached_at_s, self._patience_s
            )
            if failure is not None:
                return failure
            backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**num_failures)
            num_failures = min(num_failures + 1, 10)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))

    async def _connect_once(self) -> Exception | None:
        """Open a socket and serve it until it ends; return the error that ended it, None for a normal close."""
        host = urlsplit(self._url).hostname or ""
        # A proxy from the environment cannot reach this machine's own loopback.
        proxy: Literal[True] | None = (
            None if host == "localhost" or host.startswith("127.") or host == "::1" else True
        )
        try:
            async with connect(
                self._url,
                additional_headers=self._headers,
                max_size=MAX_FRAME_BYTES,
                proxy=proxy,
                compression=None,
                ping_interval=PING_EVERY_S,
                ping_timeout=PONG_WITHIN_S,
                open_timeout=max(1.0, min(10.0, self._patience_s)),
                close_timeout=1.0,
            ) as socket:
                await self._serve(socket)
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI, ConnectionClosed) as error:
            logger.debug("chat socket ended: %s", error)
            return error
        return None

    async def _serve(self, socket: ClientConnection) -> None:
        outbox: asyncio.Queue[Struct] = asyncio.Queue()
        self._greet(outbox)
        writer = asyncio.create_task(_write(socket, outbox), name="chat-client-writer")
        try:
            async for data in socket:
                self._on_frame(data, outbox)
                if self._failure:
                    return
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    def _greet(self, outbox: asyncio.Queue[Struct]) -> None:
        """Say hello on a new socket, and name the turns that are under way, so that the server continues them."""
        sent = [turn for turn in self._turns.values() if turn.is_sent]
        for start in range(0, max(1, len(sent)), MAX_RESUMED_TURNS):
            batch = sent[start : start + MAX_RESUMED_TURNS]
            for turn in batch:
                turn.is_resuming = True
            outbox.put_nowait(Hello(resume=[{"id": turn.message.id, "seq": turn.seq} for turn in batch]))

    def _detach(self) -> None:
        self._outbox = None
        self._end_opening(ChatError("unreachable", "the connection dropped", retryable=True))

    def _check_alive(self) -> None:
        if self._runner is None:
            raise RuntimeError("use the client inside `async with`")
        if self._failure is not None:
            raise ChatError(self._failure.code, self._failure.message, self._failure.retryable)

    def _fail(self, error: ChatError) -> None:
        """End all waiting calls with an error."""
        self._failure = self._failure or error
        self._outbox = None
        self._end_opening(self._failure)
        for turn in self._turns.values():
            turn.news.put_nowait(
                ChatError(self._failure.code, self._failure.message, self._failure.retryable)
            )
        self._greeted.set()

    def _end_opening(self, result: Session | ChatError) -> None:
        opening, self._opening = self._opening, None
        if opening is None or opening.done():
            return
        if isinstance(result, ChatError):
            opening.set_exception(result)
        else:
            opening.set_result(result)

    # Receiving.

    def _on_frame(self, data: str | bytes, outbox: asyncio.Queue[Struct]) -> None:
        self._reached_at_s = asyncio.get_running_loop().time()
        try:
            frame = decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            # A frame of a newer protocol, or of a type that this client does not use (pong, advisory).
            logger.debug("frame ignored: %s", error)
            return
        if isinstance(frame, Ready):
            self._on_ready(frame, outbox)
        elif isinstance(frame, ErrorFrame):
            self._on_error(frame, outbox)
        else:
            self._on_event(frame)

    def _on_ready(self, frame: Ready, outbox: asyncio.Queue[Struct]) -> None:
        self._ready = frame
        if frame.session is not None:
            self._end_opening(frame.session)
        if self._outbox is outbox:
            return
        self._outbox = outbox
        self._starting_since_s = None
        self._on_status("connected", "")
        self._greeted.set()
        for turn in self._turns.values():
            if not turn.is_sent:
                self._send_message(turn)
            elif turn.is_stop_wanted:
                self._put(Stop(turn.message.id))

    def _on_event(self, frame: Accepted | Delta | Done) -> None:
        turn = self._turns.get(frame.id)
        if turn is None:
            return
        if isinstance(frame, Accepted):
            events = turn.on_accepted(frame)
        elif isinstance(frame, Delta):
            events = turn.on_delta(frame)
        else:
            events = turn.on_done(frame)
        for event in events:
            turn.news.put_nowait(event)

    def _on_error(self, frame: ErrorFrame, outbox: asyncio.Queue[Struct]) -> None:
        turn = self._turns.get(frame.id) if frame.id is not None else None
        if frame.id is None:
            self._on_general_error(frame, outbox)
        elif turn is None:
            return
        elif turn.is_resuming and frame.code == "not_found":
            # Finished long ago or lost in a crash. The same message again is answered once in either case.
            turn.begin_replay()
            self._send_message(turn)
        elif frame.code == "starting":
            asyncio.get_running_loop().call_later(STARTING_POLL_S, self._send_again, turn)
        else:
            turn.news.put_nowait(frame.as_exception())

    def _on_general_error(self, frame: ErrorFrame, outbox: asyncio.Queue[Struct]) -> None:
        """Handle an error that names no turn: about the greeting, about a session to open, or about a frame not understood."""
        if self._outbox is None and frame.retryable:
            self._on_not_ready(frame, outbox)
        elif frame.code == "unauthorized" or self._outbox is None:
            self._failure = frame.as_exception()
        elif self._opening is not None:
            self._end_opening(frame.as_exception())
        elif (
            turn := next((turn for turn in self._turns.values() if not turn.is_accepted), None)
        ) is not None:
            # The server takes frames in their order, so the error is about the oldest question that it has not accepted.
            turn.news.put_nowait(frame.as_exception())
        else:
            logger.warning("the chat server answered %s: %s", frame.code, frame.message)

    def _on_not_ready(self, frame: ErrorFrame, outbox: asyncio.Queue[Struct]) -> None:
        """Greet again in a moment: the engine starts, or is being rebuilt."""
        loop = asyncio.get_running_loop()
        self._starting_since_s = self._starting_since_s or loop.time()
        self._on_status("starting", frame.message)
        if loop.time() - self._starting_since_s > self._starting_patience_s:
            self._failure = ChatError(frame.code, f"gave up waiting: {frame.message}", retryable=True)
        else:
            loop.call_later(STARTING_POLL_S, self._greet, outbox)


async def _write(socket: ClientConnection, outbox: asyncio.Queue[Struct]) -> None:
    """Send the frames of the outbox until the socket ends, which the reader sees, too."""
    with contextlib.suppress(ConnectionClosed):
        while True:
            await socket.send(encoder.encode(await outbox.get()), text=True)
            outbox.task_done()


def _final_failure(
    url: str, error: Exception | None, unreached_s: float, patience_s: float
) -> ChatError | None:
    """Return the error with which to give up on `url`, after a socket ended with `error` and `unreached_s` without the server; else None."""
    if isinstance(error, InvalidStatus) and error.response.status_code in (401, 403):
        return ChatError("unauthorized", "the server wants an API key, or does not know this one")
    if isinstance(error, InvalidURI):
        return ChatError("unreachable", f"{url} is not the address of a chat socket")
    if isinstance(error, InvalidStatus) and error.response.status_code == 404:
        return ChatError("unreachable", f"there is no chat socket at {url}: is this an Overture server?")
    close_code = error.rcvd.code if isinstance(error, ConnectionClosed) and error.rcvd else None
    if close_code == CLOSE_UNAUTHORIZED:
        return ChatError("unauthorized", "the server wants an API key, or does not know this one")
    if unreached_s > patience_s:
        return ChatError("unreachable", f"no answer from {url}: {_reason(error)}", retryable=True)
    return None


def _reason(error: Exception | None) -> str:
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error):
        return "connection refused (is the server running?)"
    if isinstance(error, TimeoutError):
        return "timed out"
    return str(error) or type(error).__name__ if error else "the server closed the connection"
