"""The assist workers compute the bits that the engine's process would, keep nothing that is not theirs, and end when they should."""

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from hypothesis import given, settings  # noqa: E402  (after the skips)
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule  # noqa: E402

from engine_bridge.driver.assist import profile  # noqa: E402
from engine_bridge.driver.assist.allocator import ALIGN_BYTES, FirstFitAllocator  # noqa: E402
from engine_bridge.driver.assist.errors import AssistLost  # noqa: E402
from engine_bridge.driver.assist.pool import AssistPool  # noqa: E402
from engine_bridge.driver.assist.shares import ModuleShape, num_workers_for, rows_per_core, split_rows  # noqa: E402
from engine_bridge.driver.lora.gemm import MIN_ROWS, OneThread  # noqa: E402
from engine_bridge.driver.lora.lora_rows import plan_rows  # noqa: E402
from engine_bridge.driver.lora.lora_weights import SlotWeights, pack_slot  # noqa: E402

from .equal_bits import assert_same  # noqa: E402

ROOT = Path(__file__).parents[3]
MAX_ROWS, MAX_IN, MAX_OUT, WEIGHT_BYTES = 300, 1024, 2048, 32 << 20
PATIENCE_S = 60.0  # for what has no time of its own; a busy machine is slow
PLAIN, FUSED = (512,), (512, 256, 256)


def make_pool(num_workers=1, **options):
    sizes = {"max_rows": MAX_ROWS, "max_in": MAX_IN, "max_out": MAX_OUT, "weight_bytes": WEIGHT_BYTES}
    return AssistPool(num_workers, **sizes | {"timeout_s": PATIENCE_S} | options)


@pytest.fixture(scope="module")
def shared_pool():
    with make_pool(2, rows_per_core=16) as pool:
        pool.wait_ready()
        yield pool


@pytest.fixture
def pool(shared_pool):
    """Two workers, 16 rows each; the test may hold adapters 0 to 9."""
    yield shared_pool
    for adapter in range(10):
        shared_pool.drop(adapter)
    assert shared_pool.free_weight_bytes == WEIGHT_BYTES


def random_layer(num_in, rank, outs, seed=0) -> SlotWeights:
    generator = torch.Generator().manual_seed(seed)
    a = [torch.randn(rank, num_in, generator=generator) * 0.05 for _ in outs]
    b = [torch.randn(out, rank, generator=generator) * 0.05 for out in outs]
    return pack_slot(a, b, [rank] * len(outs))


def random_rows(rows, width, dtype=torch.float32, seed=1):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_process(weights: SlotWeights, y, x, scale):
    """What the wrapper in `lora` makes of these rows."""
    y = y.clone()
    (block,) = plan_rows([0] * len(x))
    y_rows, x_rows = block.read(y), block.read(x)
    weights.add_to(y_rows, x_rows, scale)
    block.write(y, y_rows)
    return y


@pytest.fixture(autouse=True)
def one_thread():
    """With more, MKL computes left-over rows, fewer than four, by other kernels: at two threads of 5 to 7 and 9 to 11 rows the last ones."""
    with OneThread():
        yield


# --- the same bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("outs", [PLAIN, FUSED])
@pytest.mark.parametrize("rank", [8, 64, 128, 256])
@pytest.mark.parametrize("num_in", [256, 1024])
def test_workers_compute_the_bits_of_the_engines_process(pool, num_in, rank, outs, dtype):
    weights = random_layer(num_in, rank, outs)
    assert pool.put(1, {"m": weights})
    for rows in (1, 3, 4, 5, 7, 16, 17, 31, 33, 64, 100, 257):
        x, y = random_rows(rows, num_in, dtype), random_rows(rows, sum(outs), dtype, seed=2)
        want = in_process(weights, y, x, 0.5)
        pool.add(1, "m", y, x, 0.5)
        assert_same(y, want, f"{rows} rows")


@pytest.mark.parametrize("ranks", [(8, 8, 8), (64, 32, 16)])
def test_a_fused_layer_in_one_block_diagonal_matrix_too(pool, ranks):
    outs = (128, 64, 64)
    weights = pack_slot([random_rows(r, 256) for r in ranks], [random_rows(o, 64) for o in outs], ranks)
    assert len(weights.expands) == 1
    assert pool.put(1, {"m": weights})
    x, y = random_rows(50, 256), random_rows(50, 256, seed=2)
    want = in_process(weights, y, x, 1.0)
    pool.add(1, "m", y, x, 1.0)
    assert_same(y, want)


def test_a_prefills_bits_do_not_depend_on_the_number_of_workers(pool):
    weights = random_layer(768, 64, FUSED)
    assert pool.put(1, {"m": weights})
    x, y = random_rows(64, 768), random_rows(64, sum(FUSED))
    answers = []
    usual = pool.rows_per_core
    for pool.rows_per_core in (64, 32):
        answers.append(y.clone())
        pool.add(1, "m", answers[-1], x, 1.0)
    pool.rows_per_core = usual
    assert_same(*answers)


def test_a_layer_without_a_takes_rows_that_have_been_through_it(pool):
    weights = pack_slot(None, [random_rows(512, 16)], [16])
    assert pool.put(1, {"embedding": weights})
    x, y = random_rows(9, 32), random_rows(9, 512, seed=2)  # vLLM pads them to the maximum rank
    want = in_process(weights, y, x, 1.0)
    pool.add(1, "embedding", y, x, 1.0)
    assert_same(y, want)


def test_each_adapter_and_module_has_its_own_weights(pool):
    layers = {
        (adapter, module): random_layer(256, rank, outs, seed=adapter)
        for adapter, rank in ((1, 8), (2, 64), (3, 128))
        for module, outs in (("qkv", FUSED), ("o", PLAIN))
    }
    for adapter in (1, 2, 3):
        assert pool.put(adapter, {m: layer for (a, m), layer in layers.items() if a == adapter})
    x = random_rows(20, 256)
    for (adapter, module), layer in layers.items():
        y = torch.zeros(20, max(part.right for part in layer.expands))
        want = in_process(layer, y, x, 1.0)
        pool.add(adapter, module, y, x, 1.0)
        assert_same(y, want)


def test_columns_that_no_adapter_touches_keep_their_bits(pool):
    layer = pack_slot([random_rows(8, 64)] * 2, [random_rows(512, 8), random_rows(256, 8)], [8, 0])
    assert pool.put(1, {"m": layer})
    y = random_rows(5, 768, torch.bfloat16)
    before = y.clone()
    pool.add(1, "m", y, random_rows(5, 64), 1.0)
    assert torch.equal(y[:, 512:], before[:, 512:])
    assert not torch.equal(y[:, :512], before[:, :512])


# --- memory -------------------------------------------------------------------------------------------------------------------


def test_an_adapter_without_room_is_refused_and_dropping_one_makes_room(pool):
    big = {f"layer {i}": random_layer(1024, 128, (2048,)) for i in range(12)}  # 18 of 32 MiB
    assert pool.put(1, big)
    free = pool.free_weight_bytes
    assert not pool.put(2, big)
    assert pool.free_weight_bytes == free
    assert pool.holds(1) and not pool.holds(2)
    pool.drop(1)
    assert pool.put(2, big)


def test_a_dropped_adapters_memory_stays_while_workers_read_it(pool):
    layer = random_layer(256, 8, PLAIN)
    assert pool.put(1, {"m": layer})
    x, y = random_rows(64, 256), torch.zeros(64, 512)
    want = in_process(layer, y, x, 1.0)
    for pid in pool.pids:
        os.kill(pid, signal.SIGSTOP)
    adding = threading.Thread(target=pool.add, args=(1, "m", y, x, 1.0))
    adding.start()
    while adding.is_alive() and not pool._store._lock.locked():
        pass
    dropping = threading.Thread(target=pool.drop, args=(1,))
    dropping.start()
    try:
        assert pool.free_weight_bytes < WEIGHT_BYTES
    finally:
        for pid in pool.pids:
            os.kill(pid, signal.SIGCONT)
    for thread in (adding, dropping):
        thread.join(PATIENCE_S)
    assert_same(y, want)
    assert pool.free_weight_bytes == WEIGHT_BYTES


def test_as_many_rows_as_a_pool_takes_of_its_widest_module(pool):
    layer = random_layer(MAX_IN, 8, (MAX_OUT,))
    assert pool.put(1, {"m": layer})
    x, y = random_rows(MAX_ROWS, MAX_IN), random_rows(MAX_ROWS, MAX_OUT, seed=2)
    want = in_process(layer, y, x, 1.0)
    pool.add(1, "m", y, x, 1.0)
    assert_same(y, want)


def test_what_does_not_fit_is_refused_by_name(pool):
    layer = random_layer(256, 8, PLAIN)
    assert pool.put(1, {"m": layer})
    with pytest.raises(ValueError, match="already"):
        pool.put(1, {"m": layer})
    with pytest.raises(ValueError, match="wider"):
        pool.put(2, {"m": random_layer(256, 8, (MAX_OUT + 1,))})
    with pytest.raises(KeyError):
        pool.add(1, "other", torch.zeros(4, 512), random_rows(4, 256), 1.0)
    for rows, width, out in ((0, 256, 512), (MAX_ROWS + 1, 256, 512), (4, 255, 512), (4, 256, 511)):
        with pytest.raises(ValueError):
            pool.add(1, "m", torch.zeros(rows, out), random_rows(rows, width), 1.0)
    with pytest.raises(ValueError):
        pool.add(1, "m", torch.zeros(5, 512), random_rows(4, 256), 1.0)
    pool.drop(2)  # never there: no harm
    pool.add(1, "m", torch.zeros(4, 512), random_rows(4, 256), 1.0)


class Allocations(RuleBasedStateMachine):
    """Stretches never overlap, freed neighbours join, and there is room as long as one free stretch is large enough."""

    def __init__(self):
        super().__init__()
        self.room = FirstFitAllocator(64 * ALIGN_BYTES)
        self.taken = []

    @rule(num_bytes=st.integers(0, 20 * ALIGN_BYTES))
    def allocate(self, num_bytes):
        before = self.room.free_bytes
        offset = self.room.allocate(num_bytes)
        if offset is None:
            assert self.room.free_bytes == before
            assert before < num_bytes or self.taken
        else:
            assert offset % ALIGN_BYTES == 0
            assert before - self.room.free_bytes >= num_bytes
            self.taken.append(offset)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data):
        offset = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.room.free(offset)
        with pytest.raises(KeyError):
            self.room.free(offset)

    @invariant()
    def tiles(self):
        self.room.check_invariants()

    def teardown(self):
        for offset in self.taken:
            self.room.free(offset)
        assert self.room.allocate(self.room.capacity_bytes) == 0


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(max_examples=50)


# --- ends ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def doomed():
    """A pool of one worker for each test that ends it, started together to save time."""
    with make_pool() as patient, make_pool(timeout_s=0.2) as hasty:
        yield SimpleNamespace(patient=patient, hasty=hasty)


def stop_one(pool):
    """Put a small adapter and stop the worker, so that it cannot be quicker than the test; return rows to add to."""
    pool.wait_ready()
    assert pool.put(1, {"m": random_layer(256, 8, PLAIN)})
    os.kill(pool.pids[0], signal.SIGSTOP)
    return random_rows(8, 512)


def test_a_killed_worker_is_noticed_at_once_and_leaves_y_alone(doomed):
    pool = doomed.patient
    y = stop_one(pool)
    before = y.clone()
    killer = threading.Timer(0.05, os.kill, (pool.pids[0], signal.SIGKILL))
    killer.start()
    began = time.monotonic()
    with pytest.raises(AssistLost, match="has ended"):
        pool.add(1, "m", y, random_rows(8, 256), 1.0)
    assert time.monotonic() - began < PATIENCE_S / 10
    killer.join()
    assert torch.equal(y, before)
    assert not pool.is_alive
    with pytest.raises(AssistLost):
        pool.add(1, "m", y, random_rows(8, 256), 1.0)


def test_a_hung_worker_is_given_up_after_the_timeout_and_ended_by_close(doomed):
    pool = doomed.hasty
    y = stop_one(pool)
    with pytest.raises(AssistLost, match="in time"):
        pool.add(1, "m", y, random_rows(8, 256), 1.0)
    assert not pool.is_alive
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < PATIENCE_S / 10
    pool.close()
    assert not pool.holds(1)
    with pytest.raises(AssistLost):
        pool.put(2, {})


# Without torch, so that it starts quickly; its worker has it.
PARENT = """
import mmap, os, signal, sys, threading, time
from engine_bridge.driver.assist.layout import Job, mailboxes_bytes, memory_file
from engine_bridge.driver.assist.team import Team

def make():
    global team
    fds = {"weights": memory_file("weights", 1), "jobs": memory_file("jobs", mailboxes_bytes(1))}
    team = Team(1, memoryview(mmap.mmap(fds["jobs"], 0)), fds, None)
    team.wait_ready(time.monotonic() + 60)

if sys.argv[1] == "thread":
    maker = threading.Thread(target=make)
    maker.start()
    maker.join()
    team.give(0, Job(0, 0, 0, 0, 0, 0, 1.0))
    team.wait(time.monotonic() + 60)
else:
    make()
    os.kill(team.pids[0], signal.SIGSTOP)
print(team.pids[0], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("case", ["thread", "stopped"])
def test_a_worker_ends_with_its_parent_but_not_with_the_thread_that_made_it(case):
    """Made in a thread that has ended it still answers; stopped, only the kernel can end it."""
    command = [sys.executable, "-c", PARENT, case]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        watch = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    poller = select.poll()
    poller.register(watch, select.POLLIN)
    ended = poller.poll(10_000)
    os.close(watch)
    assert ended, "the worker outlived its parent"


def named_memory(*pids):
    """Files in /dev/shm that these processes hold. What others make there meanwhile is theirs."""
    held = set()
    for pid in pids:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        held |= {line.split(maxsplit=5)[5] for line in lines if " /dev/shm/" in line}
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                held |= {
                    link for link in [os.readlink(f"/proc/{pid}/fd/{fd}")] if link.startswith("/dev/shm/")
                }
    return held


def test_nothing_is_left_open_after_close():
    gc.collect()
    fds, names = len(os.listdir("/proc/self/fd")), named_memory("self")
    pool = make_pool(2)
    pids = pool.pids
    assert not pool.is_alive
    with pytest.raises(AssistLost, match="in time"):
        pool.wait_ready(timeout_s=0)
    assert pool.put(1, {"m": random_layer(16, 8, (16,))})
    with pytest.raises(AssistLost, match="not ready"):
        pool.add(1, "m", torch.zeros(4, 16), random_rows(4, 16), 1.0)
    assert named_memory("self", *pids) == names
    pool.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == fds
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# --- how many workers ---------------------------------------------------------------------------------------------------------


@given(rows=st.integers(1, 5000), per_core=st.integers(1, 600), num_workers=st.integers(1, 64))
def test_rows_are_shared_out_evenly_and_no_worker_gets_few(rows, per_core, num_workers):
    used = num_workers_for(rows, per_core, num_workers)
    assert 1 <= used <= num_workers
    parts = split_rows(rows, used)
    sizes = [last - first for first, last in parts]
    assert [row for first, last in parts for row in range(first, last)] == list(range(rows))
    assert max(sizes) - min(sizes) <= 1
    assert used == 1 or min(sizes) >= MIN_ROWS
    if used < num_workers and rows >= MIN_ROWS * (used + 1):
        assert max(sizes) <= per_core


@pytest.mark.parametrize(("rows", "used"), [(1, 1), (64, 1), (65, 2), (128, 2), (129, 3), (1000, 4)])
def test_a_prefill_gets_as_many_workers_as_its_rows_need(rows, used):
    assert num_workers_for(rows, 64, 4) == used


def test_the_slowest_shape_decides_how_many_rows_a_worker_takes():
    wide, narrow = ModuleShape(1024, 64, 4096), ModuleShape(1024, 64, 512)

    def measure(shape, rows):
        return rows * shape.num_out * 1e-9

    found = rows_per_core(measure, [narrow, wide], 1e-3, max_rows=10_000)
    assert 244 * 15 / 16 - 1 <= found <= 244
    assert rows_per_core(measure, [narrow], 1e-3, max_rows=100) == 100
    assert rows_per_core(measure, [wide], 1e-9, max_rows=100) == MIN_ROWS


def test_a_profile_of_a_pool_leaves_nothing_behind(pool):
    usual = pool.rows_per_core
    with profile.one_worker(pool, repeats=2) as measure:
        assert (
            8
            <= rows_per_core(measure, [ModuleShape(256, 8, 512), ModuleShape(256, 8, 256)], 10.0, max_rows=64)
            <= 64
        )
    assert pool.rows_per_core == usual
    assert not pool.holds(profile.PROFILE_ID)
