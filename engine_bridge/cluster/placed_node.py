"""A node whose process Ray starts: it has an address for as long as that process lives, and then another one."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from contextlib import suppress

from engine_bridge.cluster.host import NodeAddress
from engine_bridge.cluster.link import NodeLink
from engine_bridge.cluster.process import LOOK_EVERY_S, SILENT_S, STARTING_SILENT_S, Silence
from engine_bridge.cluster.remote_node import RemoteNode
from engine_bridge.cluster.wire import NodeReport
from engine_bridge.protocol.figures import Progress

log = logging.getLogger(__name__)

CONNECT_S = 5.0
# Between two attempts to reach a node that should be there. Chosen: a node whose connection alone broke is away no longer than this.
RETRY_S = 0.25
# Between an engine's failure for good and the next start of its process. Chosen: long enough to be seen, and a start that fails takes as long.
FAILED_S = 10.0


class PlacedNode(RemoteNode):
    """Stays connected, from `keep` on, to the address that the node was last given.

    Args:
        on_change: called when a fact of the node has changed, so with each report.
        on_silent: called when a connected node has sent nothing for SILENT_S.
        on_failed: called when a node that has served says for FAILED_S that its engine cannot be built.
    """

    def __init__(
        self,
        node_id: str,
        model_names: tuple[str, ...],
        token: bytes,
        on_change: Callable[[], None],
        on_silent: Callable[[str], None],
        on_failed: Callable[[str], None],
    ) -> None:
        super().__init__(model_names)
        self.node_id, self.stage = node_id, "waiting"
        # Incarnation of its last process, also while that is away.
        self.last_incarnation = ""
        self.problem = ""
        self._expected_names, self._token = model_names, token
        self._on_change, self._on_silent, self._on_failed = on_change, on_silent, on_failed
        self._place: NodeAddress | None = None
        self._is_placed = asyncio.Event()
        self._was_ready, self._is_closed = False, False

    # -- facts of the node ---------------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """The node's progress, from its reports and from Ray's news of its process."""
        if self._is_closed:
            return self._so("closed", "closed")
        if self.problem and not self._was_ready:
            return Progress("failed", "failed", time.monotonic() - self._since_s, self.problem)
        if not self.is_up:
            return self._so("rebuilding" if self._was_ready else "starting", self.stage)
        told = super().progress
        # A process that ends says `closed` of itself; whether the node has left is known from who placed it.
        if told.state == "closed" or (told.state == "starting" and self._was_ready):
            return Progress("rebuilding", told.stage, told.elapsed_s)
        return told

    def take_report(self, report: NodeReport) -> None:
        """Keep a report, and tell the placement."""
        super().take_report(report)
        self._note_ready()
        self._on_change()

    def _note_ready(self) -> None:
        """A report comes before it is known whether the node is fit for us."""
        if self.is_up and super().progress.state == "ready":
            self._was_ready = True

    # -- where it is ---------------------------------------------------------------------------------------------------

    def move_to(self, place: NodeAddress | None, stage: str, problem: str = "") -> None:
        """Give the node another address, or none (None). stage: a phrase on what happens meanwhile. problem: why it has no address."""
        self._place, self.stage, self.problem = place, stage, problem
        if place is not None:
            self._is_placed.set()
            if self.incarnation not in ("", place.incarnation):
                # The machine of the last process vanished without closing the connection.
                self.cut()
        else:
            self._is_placed.clear()
        self._on_change()

    def end(self) -> None:
        """Note that the node will not come back."""
        self._is_closed = True
        self.move_to(None, "closed")

    async def keep(self, tls: ssl.SSLContext | None) -> None:
        """Keep the node connected until this is cancelled."""
        while True:
            await self._is_placed.wait()
            assert self._place is not None
            try:
                await self._live(self._place, tls)
            except (OSError, TimeoutError, ssl.SSLError) as error:
                log.debug("%s cannot be reached: %s", self.node_id, error)
            except Exception:
                # A foreign node may name any place, and say anything; it may also come to its senses.
                log.exception("the connection to %s failed; it is tried again", self.node_id)
            await asyncio.sleep(RETRY_S)

    async def _live(self, place: NodeAddress, tls: ssl.SSLContext | None) -> None:
        """Serve one connection to its end. Raises OSError, TimeoutError if it cannot be made."""
        loop, lost = asyncio.get_running_loop(), asyncio.Event()
        async with asyncio.timeout(CONNECT_S):
            transport, link = await loop.create_connection(
                lambda: NodeLink(self._token, self.take_report, lost.set), place.host, place.port, ssl=tls
            )
        try:
            async with asyncio.timeout(CONNECT_S):
                await link.greeted
            if self._is_fit(link):
                await self._serve(link, lost)
            else:
                await lost.wait()
        finally:
            self.detach()
            transport.abort()
            self._on_change()

    def _is_fit(self, link: NodeLink) -> bool:
        """Return whether the node serves our model. Clients ask for one model: a node with another gets no work."""
        if self.model_names == self._expected_names:
            return True
        theirs, ours = ", ".join(self.model_names), ", ".join(self._expected_names)
        self.problem = (
            f"it serves {theirs}, and this gateway serves {ours}: "
            "give both the same --model (or --served-model-name and --served-model-alias)"
        )
        log.error("%s gets no work: %s", link.node_id, self.problem)
        self._on_change()
        return False

    async def _serve(self, link: NodeLink, lost: asyncio.Event) -> None:
        if self.last_incarnation not in ("", link.incarnation):
            self._num_deaths += 1
        self.last_incarnation, self.problem = link.incarnation, ""
        self.attach(link)
        self._note_ready()
        self._on_change()
        loop, silence, silent_s, failed_s = asyncio.get_running_loop(), Silence(LOOK_EVERY_S), 0.0, 0.0
        # A little less than the router gives it, which only ends its answers.
        while (
            not lost.is_set()
            and silent_s < (STARTING_SILENT_S if self.is_starting else SILENT_S) - LOOK_EVERY_S
        ):
            with suppress(TimeoutError):
                await asyncio.wait_for(lost.wait(), LOOK_EVERY_S)
            silence.look(loop.time())
            silent_s = silence.seconds(link.reported_s, loop.time())
            has_failed = self._was_ready and super().progress.state == "failed"
            failed_s = failed_s + LOOK_EVERY_S if has_failed else 0.0
            if FAILED_S <= failed_s < FAILED_S + LOOK_EVERY_S:  # once
                self._on_failed(self.node_id)
        if not lost.is_set():
            log.error("%s has said nothing for %.0f s: its process is killed", self.node_id, silent_s)
            self._on_silent(self.node_id)
        self._since_s = time.monotonic()
