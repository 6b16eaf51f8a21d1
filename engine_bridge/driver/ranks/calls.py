"""How the engine's process calls its ranks between two steps.

vLLM's queue to the ranks is in order: a call that is not waited for is carried out before the next step in every rank. A call that raised in one rank
would leave the other ranks' replies in vLLM's queues, and the next step would take one of them for its own. So no method that is called here raises:
`answered` makes an error its answer.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from engine_bridge.driver.ranks.messages import CopiesMade, RegionCopy
from engine_bridge.policy.costs.costs import Copied

# Calls that no reply has been read of. vLLM's queues hold ten; the step's own reply must fit in, too. Chosen.
MAX_UNREAD = 4


class RankError(RuntimeError):
    """A rank could not do what it was asked to do."""


def answered(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a rank's method return (True, its value), or (False, what went wrong)."""

    @functools.wraps(method)
    def call(*args: Any) -> tuple[bool, Any]:
        """Call the method."""
        try:
            return True, method(*args)
        except Exception as error:
            return False, f"{type(error).__name__}: {error}"

    return call


def values_of(answers: Sequence[tuple[bool, Any]]) -> list[Any]:
    """Return what each rank has answered. Raises RankError with the first rank's problem, if any has one."""
    for rank, (is_right, value) in enumerate(answers):
        if not is_right:
            raise RankError(f"rank {rank}: {value}")
    return [value for _, value in answers]


class Ranks:
    """The ranks of one engine, as its process calls them. On the engine thread.

    Args:
        executor: vLLM's `MultiprocExecutor`.
    """

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._unread: deque[Any] = deque()
        self._problem: BaseException | None = None

    def watch(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, on another thread, when a rank ends by itself, so that an idle engine notices."""
        self._executor.register_failure_callback(wake)

    @property
    def has_failed(self) -> bool:
        """Whether a rank has ended, or could not do what it was sent to do."""
        return self._problem is not None or bool(self._executor.is_failed)

    def check(self) -> None:
        """Raise RankError if a rank has ended or could not do what it was sent to do: what the engine's caches say is not to be trusted then."""
        if self.has_failed:
            raise RankError("a rank of the engine has failed or ended") from self._problem

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of each rank, and return the answers in the ranks' order.

        Raises:
            RankError: a rank could not do it.
            RuntimeError: a rank has ended.
        """
        return values_of(self._executor.collective_rpc(method, args=args))

    def send(self, method: str, *args: Any, then: Callable[[list[Any]], None]) -> None:
        """Call a method of each rank before the next step. `then` is called with the answers when a later call or step has been waited for.

        Where a rank could not do it, `then` is not called and `check` raises. Raises RuntimeError where a rank has ended.
        """
        while self._unread and self._unread[0].done():
            self._unread.popleft()
        if len(self._unread) >= MAX_UNREAD:
            self._unread.popleft().result()
        future = self._executor.collective_rpc(method, args=args, non_block=True)
        future.add_done_callback(lambda done: self._read(done, then))
        self._unread.append(future)

    def _read(self, done: Any, then: Callable[[list[Any]], None]) -> None:
        try:
            then(values_of(done.result()))
        except Exception as error:
            self._problem = error


class RanksCopier:
    """Copies between two steps, by one call that all ranks carry out before the next step.

    Args:
        ranks: the engine's ranks.
        is_busy: returns whether requests run or wait, so that a step follows.
    """

    overlaps = False

    def __init__(self, ranks: Ranks, is_busy: Callable[[], bool]) -> None:
        self._ranks, self._is_busy = ranks, is_busy
        self._copies: list[RegionCopy] = []
        self._open: list[Callable[[], None]] = []
        self.out, self.back = Copied(), Copied()

    def to_host(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy a layer's device blocks into slots, with the next `end_step`."""
        self._copies.append(RegionCopy(False, layer, list(blocks), list(slots)))

    def to_device(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy slots into a layer's device blocks, with the next `end_step`."""
        self._copies.append(RegionCopy(True, layer, list(blocks), list(slots)))

    def flush(self) -> None:
        """Do nothing: the ranks copy what is sent before they compute the next step."""

    def end_step(self, then: Callable[[], None], failed: Callable[[], None] | None = None) -> None:
        """Have the ranks make the copies, and call `then` once all have.

        While requests run or wait, they are not waited for: the next step is behind the copies in every rank.

        Raises:
            RuntimeError: a rank has ended, or could not copy.
        """
        copies, self._copies = self._copies, []
        if not copies:
            then()
        elif self._is_busy():
            self._open.append(then)
            self._ranks.send("overture_copy", copies, then=functools.partial(self._made, then))
        else:
            self._open.append(then)  # given up by `rest` where a rank ends meanwhile
            self._made(then, self._ranks.call("overture_copy", copies))

    def rest(self) -> None:
        """Give up the copies that no rank has answered for. The ranks must have ended."""
        still_open, self._open = self._open, []
        for then in still_open:
            then()

    def hear(self, made: CopiesMade) -> None:
        """Count copies that the ranks have made, all of them at the same time."""
        self.out.add(made.out.num_bytes, made.out.seconds, made.out.num_copies)
        self.back.add(made.back.num_bytes, made.back.seconds, made.back.num_copies)

    def _made(self, then: Callable[[], None], answers: list[CopiesMade]) -> None:
        self._open.remove(then)
        self._heard(answers)
        then()

    def _heard(self, answers: list[CopiesMade]) -> None:
        self.hear(functools.reduce(CopiesMade.beside, answers))
