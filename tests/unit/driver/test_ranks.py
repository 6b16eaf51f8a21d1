"""Ranks without vLLM's processes: what is sent to them, what they copy, and what becomes of their answers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_bridge.driver.kv.layer_groups import Layers
from engine_bridge.driver.ranks import calls
from engine_bridge.driver.ranks.adapters import RankHost
from engine_bridge.driver.ranks.calls import (
    LATE_S,
    MAX_UNREAD,
    RankError,
    Ranks,
    RanksCopier,
    SentCopies,
    answered,
)
from engine_bridge.driver.ranks.connection import LateAnswers
from engine_bridge.driver.ranks.failing import TELL, RankFailed, telling
from engine_bridge.driver.ranks.messages import CopiesMade, RankMoves, RegionCopy, StepAnswers
from engine_bridge.driver.ranks.rank_copies import RankCopies, thread_on
from engine_bridge.driver.ranks.starting import ranks_starting
from engine_bridge.driver.vllm_api import WorkerProc
from engine_bridge.policy.costs.costs import Copied
from engine_bridge.policy.limits.cores import WAITING, cores_of_ranks
from kvtiers.io.host_pool import HostPool

from .test_kv_connector import group_of_names

NUM_RANKS, NUM_LAYERS, NUM_BLOCKS, NUM_SLOTS = 2, 3, 6, 12
SHAPE = (NUM_BLOCKS, 2, 4)  # of a rank's layer, in float32
ROW_BYTES = 2 * 4 * 4


class Rank:
    """A rank's side of the tiers, over a cache of its own."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        self.layers = {str(layer): torch.rand(SHAPE, generator=generator) for layer in range(NUM_LAYERS)}
        layers = Layers(self.layers, [group_of_names(*self.layers)], NUM_BLOCKS)
        self.copies = RankCopies(layers, (), by_layer=True)
        self.number = number

    def step(self, moves: RankMoves, *, num_layers: int = NUM_LAYERS) -> StepAnswers | None:
        """Take a step, in which the forward pass comes to so many layers."""
        self.copies.begin(moves)
        for layer in range(num_layers):
            self.copies.load(layer)
            self.copies.save(0, layer)
        self.copies.end()
        return self.copies.take_answers()

    def block(self, number: int) -> bytes:
        return b"".join(layer[number].numpy().tobytes() for layer in self.layers.values())

    @answered
    def overture_copy(self, number: int, copies: Sequence[RegionCopy]) -> StepAnswers | None:
        return self.copies.carry_out(number, copies)

    @answered
    def overture_answers(self) -> StepAnswers | None:
        return self.copies.take_answers()

    @answered
    def fail(self, in_rank: int) -> int:
        if self.number == in_rank:
            raise ValueError("as asked")
        return self.number


class Executor:
    """vLLM's queues to and from ranks: calls are carried out in order, and replies are read when one is waited for."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks, self.is_failed = ranks, False
        self._unread: deque[tuple[Future[Any], list[Any]]] = deque()

    def collective_rpc(
        self, method: str, *, timeout: float, args: tuple[Any, ...] = (), non_block: bool = False
    ) -> Any:
        if self.is_failed:
            raise RuntimeError("Executor failed.")
        future = _Waited(self.read)
        self._unread.append((future, [getattr(rank, method)(*args) for rank in self.ranks]))
        return future if non_block else future.result()

    @property
    def num_unread(self) -> int:
        return len(self._unread)

    def read(self) -> None:
        future, answers = self._unread.popleft()
        future.set_result(answers)


class _Waited(Future[Any]):
    def __init__(self, read: Callable[[], None]) -> None:
        super().__init__()
        self._read = read

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            self._read()
        return super().result()


@pytest.fixture
def ranks() -> list[Rank]:
    """Two ranks that share a region."""
    found = [Rank(number) for number in range(NUM_RANKS)]
    pool = HostPool(NUM_RANKS * ROW_BYTES, NUM_SLOTS * NUM_RANKS * ROW_BYTES, is_shared=True)
    for rank in found:
        rank.copies.attach(pool.path, NUM_SLOTS, rank.number, NUM_RANKS)
        rank.pool = pool  # type: ignore[attr-defined]
    return found


@pytest.fixture
def executor(ranks: list[Rank]) -> Executor:
    return Executor(ranks)


def saving(number: int, blocks: Sequence[int]) -> RankMoves:
    saves = [
        (0, block, list(range(NUM_LAYERS * at, NUM_LAYERS * (at + 1)))) for at, block in enumerate(blocks)
    ]
    return RankMoves(number, saves=saves)


def test_a_slot_has_the_part_of_each_rank_and_comes_back_to_other_blocks(ranks: list[Rank]) -> None:
    before = [[rank.block(number) for number in (1, 4)] for rank in ranks]
    for rank in ranks:
        answers = rank.step(saving(7, [1, 4]))
        assert answers is not None and (answers.ended, answers.failed) == ({7: 1}, set())
        assert answers.made.out.num_bytes == 2 * NUM_LAYERS * ROW_BYTES
    pool = ranks[0].pool  # type: ignore[attr-defined]
    for layer in range(NUM_LAYERS):  # of block 1: its parts lie side by side, in the order of the ranks
        parts = [rank.layers[str(layer)][1].numpy().tobytes() for rank in ranks]
        assert bytes(pool.slot(layer)) == b"".join(parts)
    for rank, expected in zip(ranks, before, strict=True):
        for layer in rank.layers.values():
            layer.fill_(0)
        slots = [list(range(NUM_LAYERS)), list(range(NUM_LAYERS, 2 * NUM_LAYERS))]
        answers = rank.step(RankMoves(8, load_blocks=[0, 5], load_slots=slots))
        assert [rank.block(0), rank.block(5)] == expected
        assert rank.block(2) == bytes(NUM_LAYERS * ROW_BYTES)
        assert answers is not None and answers.made.out == Copied()
        assert answers.made.back.num_bytes == 2 * NUM_LAYERS * ROW_BYTES
        assert rank.step(RankMoves()) is None
    assert HostPool(64, 640).path == "", "what no rank shares has no file"


def test_a_step_that_did_not_come_to_all_layers_fails(ranks: list[Rank]) -> None:
    answers = ranks[0].step(saving(1, [2]), num_layers=NUM_LAYERS - 1)
    assert answers is not None and answers.failed == {1}
    again = ranks[0].step(saving(2, [2]))
    assert again is not None and not again.failed


class Slow:
    """As a CUDA device: what a copy is made for is called by another thread, later; `is_failing`: as the device fails."""

    def __init__(self, copier: Any) -> None:
        self._copier, self.waiting = copier, []
        self.is_failing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copier, name)

    def end_step(self, then: Callable[[], None], failed: Callable[[], None] | None = None) -> None:
        self.waiting.append(failed if self.is_failing and failed else then)

    def rest(self) -> None:
        for then in self.waiting:
            then()
        self.waiting = []


def test_copies_that_end_late_are_answered_late(ranks: list[Rank]) -> None:
    copies = ranks[0].copies
    slow = copies._copier = Slow(copies.copier)  # type: ignore[assignment]
    assert ranks[0].step(saving(1, [2])) is None
    slow.is_failing = True
    assert ranks[0].step(saving(2, [3])) is None
    slow.is_failing = False
    assert copies.carry_out(3, [RegionCopy(True, 0, [0], [0])]) is None
    slow.rest()
    answers = copies.take_answers()
    assert answers is not None and (answers.ended, answers.failed) == ({1: 1, 2: 1, 3: 1}, {2})
    assert copies.take_answers() is None


def answer(number: int, *, is_right: bool = True) -> StepAnswers:
    return StepAnswers({number: 1}, set() if is_right else {number}, CopiesMade())


def test_copies_end_when_all_ranks_have_answered_and_fail_if_one_has() -> None:
    sent, ended = SentCopies(NUM_RANKS), []
    numbers = [sent.begin(lambda is_made, name=name: ended.append((name, is_made))) for name in "abc"]
    assert numbers == [1, 2, 3] and sent.num_open == 3
    sent.hear(answer(1))
    assert not ended
    both = answer(2).aggregate(answer(2, is_right=False))
    assert isinstance(both, StepAnswers)
    sent.hear(both)
    sent.hear(answer(1))
    sent.hear(answer(3, is_right=False))
    assert ended == [("b", False), ("a", True)]
    sent.hear(answer(3))
    assert ended[-1] == ("c", False) and sent.num_open == 0


def test_copies_of_several_ranks_are_all_bytes_in_the_slowest_ones_time() -> None:
    one, other = Copied(100, 4, 0.5), Copied(50, 4, 0.75)
    assert one.beside(other) == Copied(150, 4, 0.75)
    assert Copied(150, 5, 1.0).since(one) == Copied(50, 1, 0.5)


def test_a_copy_between_steps_is_waited_for_only_while_nothing_runs(
    ranks: list[Rank], executor: Executor
) -> None:
    is_busy = [True]
    copier = RanksCopier(Ranks(executor), NUM_RANKS, lambda: is_busy[0], overlaps=False)
    ended: list[str] = []
    copier.to_host(0, [1], [3])
    copier.end_step(lambda: ended.append("first"))
    assert not ended and executor.num_unread == 1
    is_busy[0] = False
    copier.to_device(0, [2], [3])
    copier.end_step(lambda: ended.append("second"))
    assert ended == ["first", "second"]
    for rank in ranks:
        assert torch.equal(rank.layers["0"][2], rank.layers["0"][1])
    assert (copier.out.num_bytes, copier.back.num_bytes) == (NUM_RANKS * ROW_BYTES, NUM_RANKS * ROW_BYTES)
    copier.end_step(lambda: ended.append("nothing to copy"))
    assert ended[-1] == "nothing to copy"


def test_calls_that_are_not_waited_for_do_not_fill_the_queues(executor: Executor) -> None:
    ranks, heard = Ranks(executor), []
    for number in range(3 * MAX_UNREAD):
        ranks.send("fail", -1, then=lambda answers, number=number: heard.append(number))
        assert executor.num_unread <= MAX_UNREAD
    assert ranks.call("fail", -1) == [0, 1]
    assert heard == list(range(3 * MAX_UNREAD))


def test_what_a_rank_cannot_do_is_said_at_once_or_by_the_next_check(executor: Executor) -> None:
    ranks, heard = Ranks(executor), []
    with pytest.raises(RankError, match="rank 1: ValueError: as asked"):
        ranks.call("fail", 1)
    ranks.check()
    ranks.send("fail", 0, then=heard.append)
    ranks.call("fail", -1)
    assert not heard and ranks.has_failed
    with pytest.raises(RankError):
        ranks.check()


def test_copies_of_ranks_that_have_ended_are_given_up(executor: Executor) -> None:
    ranks, ended = Ranks(executor), []
    copier = RanksCopier(ranks, NUM_RANKS, lambda: True, overlaps=True)
    copier.to_host(0, [1], [3])
    copier.end_step(lambda: ended.append(True), lambda: ended.append(False))
    executor.is_failed = True
    assert ranks.has_failed
    copier.rest()
    assert ended == [False]


def test_copies_of_ranks_that_go_on_beside_their_steps_end_when_each_has_told(
    ranks: list[Rank], executor: Executor
) -> None:
    now, is_busy, ended = [0.0], [False], []
    copier = RanksCopier(Ranks(executor), NUM_RANKS, lambda: is_busy[0], overlaps=True)
    late = LateAnswers(copier, lambda: is_busy[0], lambda: now[0])
    slow = [Slow(rank.copies.copier) for rank in ranks]
    for rank, each in zip(ranks, slow, strict=True):
        rank.copies._copier = each  # type: ignore[assignment]
    assert late.wait_s() is None
    copier.to_device(0, [1], [3])
    copier.end_step(lambda: ended.append(True), lambda: ended.append(False))
    assert late.has_work() and not ended
    slow[0].rest()
    late.advance()
    assert not ended and late.wait_s() == LATE_S
    slow[1].rest()
    is_busy[0] = True
    assert late.wait_s() is None, "the next step's answer tells"
    is_busy[0] = False
    now[0] = LATE_S
    late.advance()
    assert ended == [True] and late.wait_s() is None
    assert copier.back.num_bytes == NUM_RANKS * ROW_BYTES


@pytest.mark.parametrize(
    ("num_cores", "num_threads", "expected"),
    [
        (8, None, "0,1,2,3|4,5,6,7"),
        (8, 4, "4,5|6,7"),
        (5, None, "1,2|3,4"),
        (2, 1, "0|1"),
        (1, None, "nobind"),
    ],
)
def test_ranks_get_equally_many_cores(num_cores: int, num_threads: int | None, expected: str) -> None:
    found = cores_of_ranks(range(num_cores), 2, num_threads)
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == expected
    assert found[WAITING] == ("spin" if num_cores > 2 else "sleep")
    assert ("OMP_NUM_THREADS" in found) == (expected == "nobind")


def test_ranks_that_start_are_killed_at_the_end_of_their_engines_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They ignore what Python asks them with then, which waited for them for 39 s."""
    at_end: list[Callable[[], None]] = []
    killed: list[int] = []
    stock = WorkerProc.make_worker_process
    monkeypatch.setattr("atexit.register", at_end.append)
    process = SimpleNamespace(pid=7, exitcode=None, kill=lambda: killed.append(7))
    monkeypatch.setattr(WorkerProc, "make_worker_process", lambda config: SimpleNamespace(proc=process))
    with ranks_starting(is_quiet=False):
        WorkerProc.make_worker_process(None)
        at_end[0]()
    assert killed == [7]
    monkeypatch.undo()
    assert WorkerProc.make_worker_process is stock


def test_why_a_rank_cannot_start_is_said_by_the_engine_as_its_own_error_would_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM says of it that a process has failed. The ranks that have lost the first one fail after it."""

    @telling
    def load(problem: Exception) -> None:
        """Fail, as on a rank."""
        raise problem

    def start(config: object) -> SimpleNamespace:
        """Start a rank, here, that fails."""
        for problem in (FileNotFoundError("no weights"), RuntimeError("the connection is closed")):
            with pytest.raises(SystemExit):
                load(problem)
        return SimpleNamespace(proc=SimpleNamespace(pid=7, exitcode=1, kill=lambda: None))

    monkeypatch.setattr(WorkerProc, "make_worker_process", start)
    with pytest.raises(RankFailed, match=r"^FileNotFoundError: no weights\n") as raised:  # noqa: SIM117
        with ranks_starting(is_quiet=False):
            WorkerProc.make_worker_process(None)
            raise RuntimeError("a process has failed")
    assert "OSError" in raised.value.kinds
    assert "raise problem" in "".join(raised.value.__notes__)
    with (tmp_path / "another").open("w") as other:
        monkeypatch.setenv(TELL, f"/proc/self/fd/{other.fileno()}")
        with pytest.raises(FileNotFoundError):
            load(FileNotFoundError("which no process hears"))
    assert not (tmp_path / "another").read_text()


def test_a_rank_that_does_not_answer_fails_the_engine() -> None:
    """Such as one that is stopped, and has not ended: nothing else would notice."""

    def collective_rpc(method: str, *, timeout: float, args: object) -> None:
        """Wait for an answer that does not come."""
        raise TimeoutError(f"{method} timed out")

    ranks = Ranks(SimpleNamespace(is_failed=False, collective_rpc=collective_rpc))
    ranks.check()
    with pytest.raises(RankError, match="has not answered"):
        ranks.call("overture_answers")
    with pytest.raises(RankError):
        ranks.check()


def test_a_rank_that_reads_no_adapter_fails_the_engine_and_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "CALL_S", 0.01)
    ranks = Ranks(SimpleNamespace(is_failed=False))
    (here, there), (mute, stopped) = Pipe(), Pipe()
    host = RankHost(ranks, [here, mute])
    there.send((True, 7))
    with pytest.raises(RankError, match="has not read an adapter"):
        host.call("load", 1)
    assert ranks.has_failed
    stopped.send((True, "too late"))
    with pytest.raises(RankError, match="failed or ended"):
        host.call("drop", 1)
    host.close()


def test_a_rank_waits_for_its_copies_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA gives each new thread the first GPU: there the wait would take memory for a context of every rank."""
    used: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: used.append((threading.current_thread().name, device))
    )
    for device in (torch.device("cuda", 1), torch.device("cpu")):
        with thread_on(device, "kv-copies") as thread:
            assert thread.submit(lambda: len(used)).result() == 1, "before the first wait, and on a GPU only"
    assert used == [("kv-copies_0", torch.device("cuda", 1))]
