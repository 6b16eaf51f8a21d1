"""All MCP servers of this gateway: what they offer, kept for a while, and calls of their tools, counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from engine_bridge.protocol.node import Node
from gateway.metrics.metrics import Metrics
from gateway.settings.config import Config
from gateway.tools.addresses import parse_mcp_servers
from gateway.tools.catalog import NO_TOOLS, Offer, ServerTool, offer, usable
from gateway.tools.results import ToolResult, cut, text_of
from gateway.tools.server import ToolServer, ToolServerFailed

# How long a list of tools is taken for true, and how long a server that could not be asked is left alone. Chosen: turns should wait for neither.
FRESH_S, RETRY_S = 60.0, 15.0
# A turn waits no longer for a list. Chosen.
LIST_S = 5.0


class ToolLimits(NamedTuple):
    """The operator's bounds: seconds of one call, bytes of one result, and how often a turn may call tools and go on."""

    call_s: float = 30.0
    max_result_bytes: int = 32 << 10
    max_rounds: int = 8


DEFAULT_LIMITS = ToolLimits()


class Listing(NamedTuple):
    """What is known of a server. problem: a sentence, "" for none. until_s: until when that holds, on the monotonic clock."""

    tools: tuple[ServerTool, ...]
    problem: str
    until_s: float


class Toolbox:
    """The servers that the operator has named.

    Args:
        servers: their addresses by their names.
        metrics: counts calls.
        limits: of calls.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        servers: Mapping[str, str],
        metrics: Metrics,
        limits: ToolLimits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._servers = {name: ToolServer(name, url) for name, url in servers.items()}
        self._metrics, self._clock = metrics, clock
        self.limits = limits
        self._known: dict[str, Listing] = {}
        self._listing: dict[str, asyncio.Task[Listing]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all servers, in the operator's order."""
        return tuple(self._servers)

    async def listing(self, name: str) -> Listing:
        """Return what a server offers, as it was said lately or is said now."""
        known = self._known.get(name)
        if known is not None and self._clock() < known.until_s:
            return known
        return await asyncio.shield(self._renewed(name))

    async def _usual(self, name: str) -> Listing:
        """Return what a server offers for a turn, which does not wait where something was on offer before: that is asked anew meanwhile."""
        known = self._known.get(name)
        if known is None or not known.tools or self._clock() < known.until_s:
            return await self.listing(name)
        self._renewed(name)
        return known

    def _renewed(self, name: str) -> asyncio.Task[Listing]:
        """Ask a server what it offers. Callers that come meanwhile share the answer."""
        task = self._listing.get(name)
        if task is None:
            known = self._known.get(name)
            task = self._listing[name] = asyncio.create_task(self._list(self._servers[name], known))
            task.add_done_callback(lambda _: self._listing.pop(name, None))
        return task

    async def _list(self, server: ToolServer, known: Listing | None) -> Listing:
        try:
            tools, num_unusable = usable(server.name, await server.list_tools(LIST_S))
        except ToolServerFailed as failure:
            # Tools that were there a while ago stay on offer: a call of one says what is wrong, and the prompt's beginning stays as it was.
            tools, lasts_s = list(known.tools) if known else [], RETRY_S
            problem = str(failure) if tools else f"{failure} Its tools are missing."
        else:
            problem, lasts_s = "", FRESH_S
            if num_unusable:
                problem = f"{num_unusable:,} of the tools of {server.name} are left out: their descriptions cannot be read."
        listing = self._known[server.name] = Listing(tuple(tools), problem, self._clock() + lasts_s)
        return listing

    async def offer(self, names: Iterable[str] | None, node: Node) -> Offer:
        """Return what a turn offers of the servers that are switched on; names that the operator has taken away are passed over.

        node: answers the turn. Descriptions take about a quarter of what its model reads, at most.
        """
        wanted = set(names or ())
        on = [name for name in self._servers if name in wanted]
        if not on or not node.can_use_tools:
            return NO_TOOLS
        listings = dict(zip(on, await asyncio.gather(*map(self._usual, on)), strict=True))
        problems = {name: listing.problem for name, listing in listings.items() if listing.problem}
        return offer(
            {name: listing.tools for name, listing in listings.items()}, problems, node.max_model_len
        )

    async def call(self, tool: ServerTool, arguments: Mapping[str, Any], max_model_len: int) -> ToolResult:
        """Call a tool. What goes wrong is a result, too. The result takes about a quarter of the model's context at most."""
        result = await self._call(tool, arguments)
        limit = self.limits.max_result_bytes
        return result._replace(text=cut(result.text, min(limit, max_model_len or limit)))

    async def _call(self, tool: ServerTool, arguments: Mapping[str, Any]) -> ToolResult:
        try:
            reply = await self._servers[tool.server].call(tool.tool, dict(arguments), self.limits.call_s)
        except ToolServerFailed as failure:
            self.count(tool.server, "failed")
            return ToolResult(str(failure), is_error=True)
        except asyncio.CancelledError:
            self.count(tool.server, "stopped")
            raise
        self.count(tool.server, "tool_error" if reply.is_error else "done")
        return ToolResult(text_of(reply.result), is_error=reply.is_error)

    def count(self, server: str, outcome: str) -> None:
        """Count a call, by what became of it."""
        self._metrics.tool_calls.labels(server, outcome).inc()


def toolbox_of(config: Config, metrics: Metrics) -> Toolbox:
    """Return the toolbox of the servers that the settings name."""
    limits = ToolLimits(config.mcp_timeout_s, config.mcp_result_kib << 10, config.mcp_rounds)
    return Toolbox(parse_mcp_servers(config.mcp_servers), metrics, limits)
