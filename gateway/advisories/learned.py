"""Learned advisories: agents that send none get them too, from the order in which agents asked before. Source: spec E5.

Only requests that name their agent (`X-Agent-Name`) are learned from; a run may be named (`X-Workflow-Id`). The gateway acts on a guess if its
expected saving exceeds its expected cost, and while the bytes moved in vain stay a bounded share of the useful ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from engine_bridge.protocol.node import Figures
from gateway.advisories import learned_file
from gateway.advisories.advisories import MAX_TTL_S, Advisories, AdvisoryRecord, AdvisoryRequest
from gateway.advisories.followers import AgentCall, Followers, LikelyCall
from gateway.advisories.waste import WasteBudget, worth
from gateway.errors import GatewayError

log = logging.getLogger(__name__)

# A session's KV before one was seen, and the speed of copies to the device: priors of an estimate that only has to tell much from little. Chosen.
PRIOR_BYTES, COPY_BYTES_PER_S, PRIOR_DISK_BYTES_PER_S = 50e6, 4e9, 500e6
SMOOTHING = 0.1
SAVE_EVERY_S = 60.0  # chosen: a crash costs a minute of learning


class Learned:
    """Watches requests and advises the node about the next ones that are likely.

    Args:
        is_on: the operator's switch; if off, nothing is kept.
        file: where the learned state outlives the process; None for nowhere.
    """

    def __init__(
        self,
        node: Figures,
        advisories: Advisories,
        *,
        is_on: bool,
        file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._advisories = advisories
        self._is_on = is_on
        self._file = file if is_on else None
        self._clock = clock
        self._followers = Followers()
        self._budget = WasteBudget()
        self._mean_bytes = PRIOR_BYTES
        self._has_news = False

    def arrived(self, arrival: AgentCall) -> None:
        """Learn from an agent's request, and advise about other agents that may follow it. Never raises: learning must not fail a request."""
        if not self._is_on or not arrival.agent:
            return
        try:
            now = self._clock()
            self._followers.note(arrival, now)
            self._has_news = True
            self._advise(arrival, now, is_over=False)
        except Exception:
            log.exception("learning from a request failed")

    def ended(self, arrival: AgentCall) -> None:
        """Learn that a request was answered: from now on the agent itself may ask again, too. Never raises."""
        if not self._is_on or not arrival.agent:
            return
        try:
            now = self._clock()
            self._followers.ended(arrival, now)
            self._advise(arrival, now, is_over=True)
        except Exception:
            log.exception("learning from the end of a request failed")

    # -- what outlives a restart -------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Load what `save` has kept; nothing if there is no file. A damaged file is logged and ignored."""
        if self._file is not None:
            for owner in await asyncio.to_thread(learned_file.read, self._file):
                self._followers.restore(owner)

    async def save(self) -> None:
        """Store the learned state if it has changed. A disk that is full or missing is logged; the next call tries again."""
        if self._file is None or not self._has_news:
            return
        self._has_news = False
        lines = []
        for owner in self._followers.saved():
            lines.append(learned_file.line_of(owner))
            await asyncio.sleep(0)  # a full one takes some milliseconds, and others wait for the event loop
        try:
            await asyncio.to_thread(learned_file.write, self._file, lines)
        except OSError as error:
            self._has_news = True
            log.warning("%s: what was learned of agents could not be stored: %s", self._file, error)

    async def forget(self, owner: str) -> None:
        """Forget all that was learned of an owner's agents, in the file, too."""
        self._followers.forget(owner)
        self._has_news = True
        await self.save()

    async def keep_saving(self) -> None:
        """Save now and then, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            await self.save()

    # -- advising ----------------------------------------------------------------------------------------------------

    def _advise(self, arrival: AgentCall, now: float, *, is_over: bool) -> None:
        for guess in self._followers.expected(arrival, now):
            # A session that is expected already needs no second advisory, and until its answer is whole the agent cannot ask again.
            if (is_over or guess.agent != arrival.agent) and not self._advisories.expects(
                arrival.owner, guess.session_id
            ):
                self._act_on(arrival.owner, guess, now)

    def _act_on(self, owner: str, guess: LikelyCall, now: float) -> None:
        if not worth(guess.probability, self._saved_s(), self._mean_bytes / COPY_BYTES_PER_S):
            return
        num_bytes = int(self._mean_bytes)
        if len(guess.session_id) > 128 or not self._budget.start(num_bytes, now):
            return
        wanted = AdvisoryRequest(
            session_id=guess.session_id,
            model=guess.adapter,
            expected_arrival_s=min(guess.earliest_s, MAX_TTL_S),
            ttl_s=min(guess.lifetime_s, MAX_TTL_S),
        )
        account = _Account(self, num_bytes)
        try:
            self._advisories.submit(owner, wanted, "learned", account, probability=guess.probability)
        except GatewayError:
            self._budget.note("not_moved", num_bytes, now)

    def _saved_s(self) -> float:
        stats = self._node.figures().kv_tiers
        disk = (
            stats.disk.bytes_per_s if stats is not None and stats.disk.bytes_per_s else PRIOR_DISK_BYTES_PER_S
        )
        return self._mean_bytes / disk + self._mean_bytes / COPY_BYTES_PER_S


class _Account:
    """The budget taken for one guess, until its advisory ends."""

    def __init__(self, learned: Learned, num_bytes: int) -> None:
        self._learned = learned
        self._num_bytes = num_bytes
        self._is_open = True

    def __call__(self, record: AdvisoryRecord) -> None:
        if not record.is_over or record.report is None:
            return
        # Bytes read from disk or peers are also copied, unless the device had no room, so the larger number counts the bytes moved.
        report = record.report
        moved = max(report.host_bytes, report.disk_bytes + report.peer_bytes) + report.adapter_bytes
        if moved:
            learned = self._learned
            learned._mean_bytes += SMOOTHING * (moved - learned._mean_bytes)
        is_used = record.report.state in ("hit", "late")
        self.close("not_moved" if not moved else "used" if is_used else "wasted")

    def close(self, outcome: str) -> None:
        """Return the bytes to the budget, once. outcome: `used`, `wasted` or `not_moved`."""
        if self._is_open:
            self._is_open = False
            self._learned._budget.note(outcome, self._num_bytes, self._learned._clock())  # type: ignore[arg-type]
