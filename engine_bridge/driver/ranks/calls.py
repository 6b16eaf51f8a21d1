"""How the engine's process calls its ranks between two steps.

vLLM's queue to the ranks is in order: a call that is not waited for is carried out before the next step in every rank. A call that raised in one rank
would leave the other ranks' replies in vLLM's queues, and the next step would take one of them for its own. So no method that is called here raises:
`answered` makes an error its answer.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from engine_bridge.driver.ranks.messages import RegionCopy, StepAnswers
from engine_bridge.policy.costs.costs import Copied

# Calls that no reply has been read of. vLLM's queues hold ten; the step's own reply must fit in, too. Chosen.
MAX_UNREAD = 4
# After which a rank that does not answer counts as failed: as long as vLLM waits for a step (0.32). A rank that is stopped, or whose device hangs,
# has not ended, so nothing else would notice.
CALL_S = 300.0
# Between two looks for answers that no step brings. Chosen: a promotion's next piece waits for it while nothing runs.
LATE_S = 0.005


class RankError(RuntimeError):
    """A rank has ended or failed at a call."""


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
    """The ranks of one engine, as its process calls them. On the engine thread. executor: vLLM's `MultiprocExecutor`."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._unread: deque[Any] = deque()
        self._problem: BaseException | None = None

    def watch(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, on another thread, when a rank ends by itself, so that an idle engine notices."""
        self._executor.register_failure_callback(wake)

    @property
    def has_failed(self) -> bool:
        """Whether a rank has ended or failed at a call."""
        return self._problem is not None or bool(self._executor.is_failed)

    def check(self) -> None:
        """Raise RankError if a rank has ended or failed at a call: the engine's caches are not to be trusted then."""
        if self.has_failed:
            raise RankError("a rank of the engine has failed or ended") from self._problem

    def give_up(self, problem: RankError) -> None:
        """Have `check` raise: a rank is not to be asked any more. From any thread."""
        self._problem = problem

    @contextmanager
    def _noting_silence(self) -> Iterator[None]:
        """Give up where a rank does not answer in time. Raises RankError then."""
        try:
            yield
        except TimeoutError as error:
            silent = RankError(f"a rank of the engine has not answered for {CALL_S:.0f} s")
            self.give_up(silent)
            raise silent from error

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of each rank, and return the answers in the ranks' order.

        Raises:
            RankError: a rank could not do it, or does not answer.
            RuntimeError: a rank has ended.
        """
        with self._noting_silence():
            return values_of(self._executor.collective_rpc(method, timeout=CALL_S, args=args))

    def send(self, method: str, *args: Any, then: Callable[[list[Any]], None]) -> None:
        """Call a method of each rank before the next step. `then` is called with the answers when a later call or step has been waited for.

        Where a rank could not do it, `then` is not called and `check` raises. Raises RuntimeError where a rank has ended.
        """
        while self._unread and self._unread[0].done():
            self._unread.popleft()
        if len(self._unread) >= MAX_UNREAD:
            with self._noting_silence():
                self._unread.popleft().result()
        future = self._executor.collective_rpc(method, timeout=CALL_S, args=args, non_block=True)
        future.add_done_callback(lambda done: self._read(done, then))
        self._unread.append(future)

    def _read(self, done: Any, then: Callable[[list[Any]], None]) -> None:
        try:
            then(values_of(done.result()))
        except Exception as error:
            self._problem = error


class SentCopies:
    """The copies that the ranks have been told of, and not all of them have made: those of steps, and those between two."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._last = 0
        self._open: dict[int, Callable[[bool], None]] = {}
        self._answered: dict[int, int] = {}
        self._failed: set[int] = set()

    @property
    def num_open(self) -> int:
        """How many they are."""
        return len(self._open)

    def begin(self, ended: Callable[[bool], None]) -> int:
        """Return the number by which ranks answer for new copies. `ended` is called when all have answered, and told whether all have copied."""
        self._last += 1
        self._open[self._last] = ended
        return self._last

    def hear(self, answers: StepAnswers) -> None:
        """End the copies that all ranks have answered for by now."""
        self._failed |= answers.failed
        for number, num_answers in answers.ended.items():
            self._answered[number] = self._answered.get(number, 0) + num_answers
            if self._answered[number] == self._num_ranks:
                del self._answered[number]
                is_made = number not in self._failed
                self._failed.discard(number)
                self._open.pop(number)(is_made)


class RanksCopier:
    """Copies between two steps, by one call that all ranks carry out before the next step. It hears the answers for copies of steps, too.

    Args:
        is_busy: returns whether requests run or wait, so that a step follows.
    """

    def __init__(self, ranks: Ranks, num_ranks: int, is_busy: Callable[[], bool], *, overlaps: bool) -> None:
        self.overlaps = overlaps
        self._ranks, self._is_busy = ranks, is_busy
        self.sent = SentCopies(num_ranks)
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
        """Do nothing: the ranks begin sent copies before the next step."""

    def end_step(self, then: Callable[[], None], failed: Callable[[], None] | None = None) -> None:
        """Have the ranks make the copies, and call `then` once all have answered that they are made; `failed` where one could not.

        While requests run or wait, no answer is waited for: the next step is behind the call in every rank.

        Raises:
            RuntimeError: a rank has ended, or could not copy.
        """
        copies, self._copies = self._copies, []
        if not copies:
            then()
            return
        give_up = failed or then
        self._open.append(give_up)  # for `rest`, where a rank ends meanwhile

        def ended(is_made: bool) -> None:
            """Tell how the copies have ended."""
            self._open.remove(give_up)
            (then if is_made else give_up)()

        number = self.sent.begin(ended)
        if self._is_busy():
            self._ranks.send("overture_copy", number, copies, then=self._hear_all)
        else:
            self._hear_all(self._ranks.call("overture_copy", number, copies))

    def rest(self) -> None:
        """Give up the copies that no rank has answered for. The ranks must have ended."""
        still_open, self._open = self._open, []
        for give_up in still_open:
            give_up()

    def ask(self) -> None:
        """Ask the ranks for the copies made since their last answer. Raises RuntimeError where a rank has ended."""
        self._hear_all(self._ranks.call("overture_answers"))

    def hear(self, answers: StepAnswers) -> None:
        """End the copies that all ranks have made by now, and count them: all ranks copy at the same time."""
        self.sent.hear(answers)
        for copied, made in ((self.out, answers.made.out), (self.back, answers.made.back)):
            copied.add(made.num_bytes, made.seconds, made.num_copies)

    def _hear_all(self, answers: Sequence[StepAnswers | None]) -> None:
        told = [each for each in answers if each is not None]
        if told:
            self.hear(functools.reduce(StepAnswers.beside, told))
