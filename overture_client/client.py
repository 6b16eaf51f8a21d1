"""Client of the gateway's HTTP door for agents: advisories that cost the caller nothing, and plain chat calls.

    async with OvertureClient("http://127.0.0.1:8000") as client:
        client.advise_soon("run-1:engineer", expected_arrival_s=3.2)
        answer = await client.chat(messages, model="base", session_id="run-1:engineer", agent="engineer")

All I/O runs in one event loop on a thread of the client's own. So it works from any thread, with or without a running loop, across several
`asyncio.run`, and a caller whose own loop is busy does not delay its advisories.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec
import orjson

T = TypeVar("T")

logger = logging.getLogger(__name__)

SESSION_HEADER = "X-Session-Id"
AGENT_HEADER = "X-Agent-Name"
ADVICE_TIMEOUT_S = 2.0  # chosen: an advisory that takes longer comes too late for most agents
CHAT_TIMEOUT_S = 600.0  # as the OpenAI SDK has it
CLOSE_S = 1.0  # chosen: for calls under way when the client is closed
MAX_IN_FLIGHT = 32  # chosen: far more than one workflow has agents
MAX_KINDS = 64  # kinds of failures that are distinguished in the log


class CallError(Exception):
    """A call failed.

    code: a code of the server's (docs/protocol.md, "Error codes"), or the client's own: ``unreachable``, ``timeout``,
    ``bad_reply``, ``closed``. http_status: None without an answer.
    """

    def __init__(self, code: str, message: str, http_status: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.http_status = http_status


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway took an advisory.

    is_merged: it renewed an earlier one of the same session, whose id this is. expires_in_s: from now.
    """

    id: str
    session_id: str
    state: str
    is_merged: bool = False
    expires_in_s: float | None = None


class AdvisoryStatus(Receipt, frozen=True, kw_only=True):
    """The state of an advisory, and once its request has come, its worth.

    state: ``hit`` and ``late`` are good ends, see docs/agents.md. tier: the fastest that holds the session's KV. num_tokens: tokens that have
    KV; device_tokens: those of them on the device. host_bytes, disk_bytes, peer_bytes: moved from there; adapter_bytes: of the adapter. lead_ms:
    from the advisory to its request. late_ms: how much sooner it should have come.
    """

    tier: str | None = None
    num_tokens: int | None = None
    device_tokens: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    peer_bytes: int | None = None
    adapter_bytes: int | None = None
    lead_ms: float | None = None
    late_ms: float | None = None


@dataclass(frozen=True, slots=True)
class AdviceCounts:
    """The number of advisories so far, by what became of them.

    num_accepted: by the gateway. num_failed: failed or refused. num_dropped: never sent, since too many were under way or the client was closed.
    """

    num_accepted: int = 0
    num_failed: int = 0
    num_dropped: int = 0


class OvertureClient:
    """Client of one gateway. Use it as a context manager, ``with`` or ``async with``, or call `close`.

    Nothing is connected before the first call.

    Args:
        base_url: ``http://host:port``, with or without ``/v1``.
        timeout_s: for advisories.
        max_in_flight: advisories under way at once; more are dropped and counted.

    Raises:
        ValueError: `base_url` is not such an address.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        timeout_s: float = ADVICE_TIMEOUT_S,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        self.base_url = api_root(base_url)
        self._key_headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._max_in_flight = max_in_flight
        # Guards all below; held for a few instructions only.
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._num_in_flight = 0
        self._counts = AdviceCounts()
        # Touched in the loop's thread only.
        self._http: aiohttp.ClientSession | None = None
        self._complaints: set[str] = set()

    # Advisories. None of these raises: advice must not break the work that it is about.

    async def advise(
        self,
        session_id: str,
        *,
        model: str | None = None,
        expected_arrival_s: float | None = None,
        ordered: bool = False,
        priority: int | None = None,
        ttl_s: float | None = None,
    ) -> Receipt | None:
        """Tell the gateway that a request of this session will come, so that its KV and its adapter are ready.

        Source: SYMPHONY §3.1, figure 11.

        Args:
            session_id: of the session.
            model: as the request will name it.
            expected_arrival_s: a lower bound from now; None if unknown.
            ordered: this client's advisories come in the order of their requests.
            priority: lower goes first; None is the usual one. Below 0, where the server allows it, its KV goes to the device at once.
            ttl_s: how long to keep the KV ready; None leaves it to the gateway.

        Returns:
            The gateway's receipt, or None without one: the gateway is down, slow, refuses, or too many advisories are under way. Each kind of
                failure is logged once.
        """
        return await asyncio.wrap_future(
            self.advise_soon(
                session_id,
                model=model,
                expected_arrival_s=expected_arrival_s,
                ordered=ordered,
                priority=priority,
                ttl_s=ttl_s,
            )
        )

    def advise_soon(
        self,
        session_id: str,
        *,
        model: str | None = None,
        expected_arrival_s: float | None = None,
        ordered: bool = False,
        priority: int | None = None,
        ttl_s: float | None = None,
    ) -> Future[Receipt | None]:
        """Advise from any thread, without waiting. The future, which may be ignored, never fails."""
        body = {
            "session_id": session_id,
            "model": model,
            "expected_arrival_s": expected_arrival_s,
            "ordered": ordered or None,
            "priority": priority,
            "ttl_s": ttl_s,
        }
        return self._advice(self._post_advisory({key: v for key, v in body.items() if v is not None}))

    async def cancel(self, advisory_id: str) -> bool:
        """Cancel an advisory. Return whether the gateway knew it."""
        is_known: bool | None = await asyncio.wrap_future(self.cancel_soon(advisory_id))
        return is_known is True

    def cancel_soon(self, advisory_id: str) -> Future[bool | None]:
        """Cancel an advisory from any thread, without waiting."""
        return self._advice(self._delete_advisory(advisory_id))

    @property
    def counts(self) -> AdviceCounts:
        """The outcomes of sending this client's advisories."""
        with self._lock:
            return self._counts

    # Calls that raise CallError.

    async def advisory(self, advisory_id: str) -> AdvisoryStatus:
        """Return the state of an advisory. Raises CallError, ``not_found`` if the gateway has forgotten it."""
        return await asyncio.wrap_future(self.advisory_soon(advisory_id))

    def advisory_soon(self, advisory_id: str) -> Future[AdvisoryStatus]:
        """Ask for the state of an advisory from any thread: call `result` on the returned future."""
        return self._submit(self._get_advisory(advisory_id))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        model: str,
        session_id: str | None = None,
        agent: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Call ``/v1/chat/completions`` once; `options` go into its body. Return the response's JSON.

        Raises CallError, and ValueError for ``stream``: use an SDK with `headers` for that.
        """
        if options.get("stream"):
            raise ValueError("chat() does not stream; use an OpenAI SDK with the headers of headers()")
        body = {"model": model, "messages": list(messages), **options}
        headers = self.headers(session_id, agent)
        call = self._call("POST", "/chat/completions", body, timeout_s=CHAT_TIMEOUT_S, headers=headers)
        answer = await asyncio.wrap_future(self._submit(call))
        if not isinstance(answer, dict):
            raise CallError("bad_reply", "the gateway's answer is not a JSON object")
        return answer

    def headers(self, session_id: str | None = None, agent: str | None = None) -> dict[str, str]:
        """Return headers that name the session and the agent, for `default_headers` or `extra_headers` of other SDKs."""
        named = {SESSION_HEADER: session_id, AGENT_HEADER: agent}
        # Names of agents are people's words; header values must be ASCII.
        return {header: quote(name, safe=_HEADER_SAFE) for header, name in named.items() if name}

    # Life.

    def close(self) -> None:
        """Give calls under way a second, then stop. May be called twice, from any thread but the client's own (a future's callback)."""
        with self._lock:
            self._is_closed = True
            loop, thread = self._loop, self._thread
            self._loop = None
        if loop is None or thread is None:
            return
        atexit.unregister(self.close)
        asyncio.run_coroutine_threadsafe(self._shut_down(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)

    # Between the threads.

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` in the client's loop, which is started now if need be. After `close` the future fails with CallError."""
        with self._lock:
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(work, self._running_loop())
        work.close()
        refused: Future[T] = Future()
        refused.set_exception(CallError("closed", "the client is closed"))
        return refused

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="overture-client", daemon=True
            )
            self._thread.start()
            # A script that ends without `close` still sends its last advisories.
            atexit.register(self.close)
        return self._loop

    def _advice(self, work: Coroutine[Any, Any, T]) -> Future[T | None]:
        """Run `work` unless too much advice is under way; if it fails in any way, the future's result is None."""
        with self._lock:
            is_dropped = self._is_closed or self._num_in_flight >= self._max_in_flight
            if is_dropped:
                self._count(num_dropped=1)
            else:
                self._num_in_flight += 1
        if not is_dropped:
            return self._submit(self._without_failing(work))
        work.close()
        nothing: Future[T | None] = Future()
        nothing.set_result(None)
        return nothing

    async def _without_failing(self, work: Coroutine[Any, Any, T]) -> T | None:
        try:
            return await work
        except CallError as error:
            self._complain(error.code, error.message)
        except Exception as error:
            # The top of the task: also a body that is no JSON, or a reply of another shape.
            self._complain(type(error).__name__, str(error))
        finally:
            with self._lock:
                self._num_in_flight -= 1
        with self._lock:
            self._count(num_failed=1)
        return None

    def _count(self, *, num_accepted: int = 0, num_failed: int = 0, num_dropped: int = 0) -> None:
        """Call it with the lock held."""
        counts = self._counts
        self._counts = AdviceCounts(
            counts.num_accepted + num_accepted,
            counts.num_failed + num_failed,
            counts.num_dropped + num_dropped,
        )

    # In the client's loop.

    async def _post_advisory(self, body: dict[str, Any]) -> Receipt:
        reply = await self._call("POST", "/advisories", body, timeout_s=self._timeout_s)
        receipt = msgspec.convert(reply, Receipt)
        with self._lock:
            self._count(num_accepted=1)
        return receipt

    async def _delete_advisory(self, advisory_id: str) -> bool:
        try:
            await self._call("DELETE", _advisory_path(advisory_id), timeout_s=self._timeout_s)
        except CallError as error:
            if error.http_status == 404:
                return False
            raise
        return True

    async def _get_advisory(self, advisory_id: str) -> AdvisoryStatus:
        reply = await self._call("GET", _advisory_path(advisory_id), timeout_s=self._timeout_s)
        try:
            return msgspec.convert(reply, AdvisoryStatus)
        except msgspec.ValidationError as error:
            raise CallError("bad_reply", f"the gateway's answer is no advisory: {error}") from error

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Return the JSON of the answer, None if it is empty. Raises CallError."""
        data = orjson.dumps(body) if body is not None else None
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session().request(method, self.base_url + path, data=data, headers=headers) as response,
            ):
                raw = await response.read()
        except asyncio.CancelledError:
            # `close` cancels late calls. The caller's own task, which waits in another loop, was not cancelled.
            if self._is_closed:
                raise CallError("closed", "the client was closed meanwhile") from None
            raise
        except TimeoutError as error:
            raise CallError("timeout", f"no answer of {self.base_url} within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise CallError("unreachable", f"cannot reach {self.base_url}: {error}") from error
        if response.status >= 400:
            raise refusal(response.status, raw)
        try:
            return orjson.loads(raw) if raw else None
        except orjson.JSONDecodeError as error:
            raise CallError("bad_reply", "the answer is not JSON", response.status) from error

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                headers={"Content-Type": "application/json", **self._key_headers},
                # Long chat calls must not hold back advisories.
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._http

    async def _shut_down(self) -> None:
        under_way = asyncio.all_tasks() - {asyncio.current_task()}
        if under_way:
            _, late = await asyncio.wait(under_way, timeout=CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    def _complain(self, kind: str, message: str) -> None:
        """Log a failed advisory; only the first of its kind as a warning, because a gateway that is down would fill the log."""
        is_new = kind not in self._complaints and len(self._complaints) < MAX_KINDS
        if is_new:
            self._complaints.add(kind)
        logger.log(
            logging.WARNING if is_new else logging.DEBUG,
            "an advisory failed (%s): %s. The work goes on without it.",
            kind,
            message,
        )


_HEADER_SAFE = "".join(map(chr, range(0x20, 0x7F)))


def api_root(url: str) -> str:
    """Return the API's address: ``http://host:8000`` and ``http://host:8000/v1/`` both give ``http://host:8000/v1``. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"not the address of a gateway: {url!r} (expected something like http://127.0.0.1:8000)"
        )
    return url.rstrip("/").removesuffix("/v1") + "/v1"


def refusal(http_status: int, raw: bytes) -> CallError:
    """Return an answer of status 400 or above as an exception."""
    try:
        error = orjson.loads(raw)["error"]
        return CallError(str(error.get("code") or http_status), str(error["message"]), http_status)
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return CallError(str(http_status), f"the gateway answered with status {http_status}", http_status)


def _advisory_path(advisory_id: str) -> str:
    return f"/advisories/{quote(advisory_id, safe='')}"
