"""One MCP server over streamable HTTP: its list of tools, and calls, each on a connection of its own within bounds of time and bytes.

A connection for each call keeps what one person does from another: a server cannot tell that two calls come from one place, and a broken connection
breaks nothing else. The SDK (`mcp`) is slow to import, so it is imported when a server is first asked.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gateway.tools.catalog import MAX_LISTED, ListedTool

if TYPE_CHECKING:
    from mcp import Client

    from gateway.tools.transport import BoundedTransport, ReplyTooLong

log = logging.getLogger(__name__)

_T = TypeVar("_T")
# What ending a session at the server may take, once it has answered. Chosen.
GOODBYE_S = 2.0
# Of one reply. Chosen: a list of a thousand tools has half a megabyte; a longer result would be cut anyway.
MAX_REPLY_BYTES = 4 << 20
# Pages of a list of tools. Chosen.
MAX_PAGES = 20
# Of what a server says of an error. Chosen: a few sentences.
MAX_SAID_CHARS = 500


class ToolServerFailed(Exception):
    """A server could not be asked. The text is a sentence, for the person and for the model."""


class CallReply(NamedTuple):
    """A result as the server gave it, in MCP's JSON."""

    result: dict[str, Any]
    is_error: bool


class ToolServer:
    """A server that the operator has named. Its address is told to nobody: it may hold a secret."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._url = url
        self._tls: ssl.SSLContext | None = None

    async def list_tools(self, timeout_s: float) -> list[ListedTool]:
        """Return its tools, as many pages of them as are looked at. Raises ToolServerFailed."""

        async def listed(client: Client) -> list[ListedTool]:
            """Read the list page by page."""
            found: list[ListedTool] = []
            cursor: str | None = None
            for _ in range(MAX_PAGES):
                page = await client.list_tools(cursor=cursor)
                found += [
                    ListedTool(tool.name, tool.description or "", tool.input_schema) for tool in page.tools
                ]
                cursor = page.next_cursor
                if cursor is None or len(found) >= MAX_LISTED:
                    break
            return found

        return await self._ask(listed, timeout_s)

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> CallReply:
        """Call a tool. Raises ToolServerFailed."""

        async def called(client: Client) -> CallReply:
            """Call it, and no more.

            Not by the client's `call_tool`, which lists all tools anew and checks results by the server's schema, on the event loop. Only texts are
            read here.
            """
            from mcp.types import CallToolRequest, CallToolRequestParams
            from pydantic import TypeAdapter

            asked = CallToolRequest(params=CallToolRequestParams(name=tool, arguments=arguments))
            # The session has checked it by the protocol's version, so it is not made into the SDK's objects and back.
            as_it_is: TypeAdapter[Any] = TypeAdapter(dict[str, Any])
            result = await client.session.send_request(asked, as_it_is)
            if "content" not in result:
                raise ValueError("a reply that is no result")
            return CallReply(result, bool(result.get("isError")))

        return await self._ask(called, timeout_s)

    async def _ask(self, work: Callable[[Client], Awaitable[_T]], timeout_s: float) -> _T:
        """Connect, and return what `work` returns. Both have `timeout_s` seconds together. Raises ToolServerFailed for whatever goes wrong."""
        found: list[_T] = []
        now = asyncio.get_running_loop().time
        refused: list[ReplyTooLong] = []
        try:
            connected, transport = await asyncio.to_thread(self._prepare)
            async with asyncio.timeout(timeout_s) as bound:

                def give_up(error: ReplyTooLong) -> None:
                    """End the wait: the SDK may ask the server whether there is more of a stream that was not read."""
                    refused.append(error)
                    if not bound.expired():
                        bound.reschedule(now())

                transport.on_refused = give_up
                async with connected as client:
                    found.append(await work(client))
                    bound.reschedule(now() + GOODBYE_S)
        except TimeoutError:
            if not found and refused:
                raise ToolServerFailed(_sentence(self.name, refused[0])) from None
            if not found:
                raise ToolServerFailed(
                    f"{self.name} did not answer within {timeout_s:g} seconds, so it was given up."
                ) from None
        except Exception as error:
            # What fails behind the answer is the goodbye.
            if not found:
                kind = type(_causes(error)[0]).__name__
                log.info("the tools of %s could not be asked: %s", self.name, kind)
                raise ToolServerFailed(_sentence(self.name, error)) from error
        return found[0]

    def _prepare(self) -> tuple[AbstractAsyncContextManager[Client], BoundedTransport]:
        """Import the SDK, read the certificates once, and return what connects, and by what. All of that reads files: not for the event loop."""
        from gateway.tools.transport import BoundedTransport, client_of, http_client

        if self._tls is None:
            self._tls = ssl.create_default_context()
        transport = BoundedTransport(self._tls, MAX_REPLY_BYTES)
        return client_of(self._url, http_client(transport), transport), transport


def _causes(error: BaseException) -> list[BaseException]:
    """Return the errors in a group of errors, as the SDK's tasks raise them, deepest first."""
    return list(_leaves(error)) or [error]


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


def _sentence(name: str, error: BaseException) -> str:
    """Return what a person is told of a failure."""
    import httpx2
    from mcp import MCPError
    from mcp.types import PARSE_ERROR

    from gateway.tools.transport import MAX_VALUES, ReplyTooLong, TooManyValues

    for cause in _causes(error):
        if isinstance(cause, TooManyValues):
            return f"{name} gave an answer of more than {MAX_VALUES:,} values, which was not read."
        if isinstance(cause, ReplyTooLong):
            return f"{name} gave an answer of more than {MAX_REPLY_BYTES >> 20} MiB, or a packed one, which was not read."
        if isinstance(cause, httpx2.TransportError):
            return f"{name} cannot be reached."
        if isinstance(cause, MCPError):
            said = " ".join(str(cause).split())
            if cause.error.code == PARSE_ERROR:
                break
            if said.startswith("Redirect to"):
                return f"{name} sends its callers to another address, which is not followed. Its operator can name that address instead."
            return f"{name} answered with an error: {said[:MAX_SAID_CHARS].rstrip('.')}."
    return f"{name} gave an answer that cannot be read."
