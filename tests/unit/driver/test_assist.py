import os
import select
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.driver.assist.allocator import ALIGN_BYTES, FirstFitAllocator
from engine_bridge.driver.assist.pool import AssistPool
from engine_bridge.driver.assist.shares import num_workers_for, split_rows
from engine_bridge.driver.assist.team import AssistLost
from engine_bridge.driver.lora.gemm import MIN_ROWS, OneThread
from engine_bridge.driver.lora.lora_rows import plan_rows
from engine_bridge.driver.lora.lora_weights import SlotWeights, pack_slot

from .equal_bits import assert_same

ROOT = Path(__file__).parents[3]
MAX_ROWS, MAX_IN, MAX_OUT, WEIGHT_BYTES = 300, 1024, 2048, 32 << 20
PATIENCE_S = 60.0  # for what has no time of its own; a busy machine is slow
PLAIN, FUSED = (512,), (512, 256, 256)


def make_pool(num_workers=1, timeout_s=PATIENCE_S, **options):
    sizes = {"max_rows": MAX_ROWS, "max_in": MAX_IN, "max_out": MAX_OUT, "weight_bytes": WEIGHT_BYTES}
    return AssistPool(num_workers, timeout_s=timeout_s, **sizes, **options)


def free_bytes(pool):
    return sum(size for _, size in pool._room._free)


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
    assert free_bytes(shared_pool) == WEIGHT_BYTES


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


def check_added(pool, adapter, module, layer, rows, num_in, dtype=torch.float32, scale=1.0):
    """The workers' sum has the bits of this process's."""
    num_out = max(part.right for part in layer.expands)
    x, y = random_rows(rows, num_in, dtype), random_rows(rows, num_out, dtype, seed=2)
    want = in_process(layer, y, x, scale)
    pool.add(adapter, module, y, x, scale)
    assert_same(y, want, f"{rows} rows")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_in", "rank", "outs"), [(256, 8, PLAIN), (1024, 64, FUSED), (256, 256, FUSED)])
def test_workers_compute_the_bits_of_the_engines_process(pool, num_in, rank, outs, dtype):
    """However many of them share the rows."""
    weights = random_layer(num_in, rank, outs)
    assert pool.put(1, {"m": weights})
    for rows in (1, 3, 4, 5, 7, 16, 17, 31, 33, 64, 257):
        check_added(pool, 1, "m", weights, rows, num_in, dtype, 0.5)


def test_each_adapter_and_module_has_its_own_weights_of_any_form(pool):
    b = [random_rows(128, 64), random_rows(64, 64), random_rows(64, 64)]
    layers = {
        (1, "qkv"): (random_layer(256, 8, FUSED, seed=1), 256),
        (2, "qkv"): (random_layer(256, 128, FUSED, seed=2), 256),
        (2, "one matrix"): (pack_slot([random_rows(r, 256) for r in (64, 32, 16)], b, (64, 32, 16)), 256),
        (3, "a slice alone"): (pack_slot([random_rows(8, 64)] * 2, [random_rows(512, 8)] * 2, [8, 0]), 64),
        # A layer without A takes rows that have been through it; vLLM pads them to the maximum rank.
        (3, "embedding"): (pack_slot(None, [random_rows(512, 16)], [16]), 32),
        (4, "widest"): (random_layer(MAX_IN, 8, (MAX_OUT,)), MAX_IN),
    }
    assert len(layers[2, "one matrix"][0].expands) == 1
    for adapter in (1, 2, 3, 4):
        assert pool.put(adapter, {m: layer for (a, m), (layer, _) in layers.items() if a == adapter})
    for (adapter, module), (layer, num_in) in layers.items():
        check_added(pool, adapter, module, layer, MAX_ROWS if module == "widest" else 20, num_in)


def test_a_dropped_adapters_memory_stays_while_workers_read_it(pool):
    layer = random_layer(256, 8, PLAIN)
    assert pool.put(1, {"m": layer})
    x, y = random_rows(64, 256), torch.zeros(64, 512)
    want = in_process(layer, y, x, 1.0)
    for pid in pool.pids:
        os.kill(pid, signal.SIGSTOP)
    adding = threading.Thread(target=pool.add, args=(1, "m", y, x, 1.0))
    adding.start()
    while adding.is_alive() and not pool._lock.locked():
        pass
    dropping = threading.Thread(target=pool.drop, args=(1,))
    dropping.start()
    try:
        assert free_bytes(pool) < WEIGHT_BYTES
    finally:
        for pid in pool.pids:
            os.kill(pid, signal.SIGCONT)
    for thread in (adding, dropping):
        thread.join(PATIENCE_S)
    assert_same(y, want)
    assert free_bytes(pool) == WEIGHT_BYTES


def test_what_does_not_fit_is_refused_by_name(pool):
    layer = random_layer(256, 8, PLAIN)
    assert pool.put(1, {"m": layer})
    with pytest.raises(ValueError, match="already"):
        pool.put(1, {"m": layer})
    with pytest.raises(ValueError, match="wider"):
        pool.put(2, {"m": random_layer(256, 8, (MAX_OUT + 1,))})
    with pytest.raises(KeyError):
        pool.add(1, "other", torch.zeros(4, 512), random_rows(4, 256), 1.0)
    most = MAX_ROWS + 1
    wrong_sizes = (((4, 512), (4, 255)), ((4, 511), (4, 256)), ((5, 512), (4, 256)))
    for y, x in (((0, 512), (0, 256)), ((most, 512), (most, 256)), *wrong_sizes):
        with pytest.raises(ValueError):
            pool.add(1, "m", torch.zeros(y), random_rows(*x), 1.0)
    pool.drop(2)  # never there: no harm
    big = {f"layer {i}": random_layer(1024, 128, (2048,)) for i in range(12)}  # 18 of 32 MiB
    assert pool.put(2, big) and not pool.put(3, big) and pool.holds(2) and not pool.holds(3)
    pool.drop(2)
    assert pool.put(3, big), "dropping one makes room"


@given(steps=st.lists(st.one_of(st.integers(0, 20 * ALIGN_BYTES), st.floats(0, 0.99)), max_size=40))
def test_stretches_never_overlap_and_freed_neighbours_are_joined(steps):
    """Steps: bytes to allocate, or which of the stretches to free."""
    room, taken = FirstFitAllocator(64 * ALIGN_BYTES), {}
    for step in steps:
        if isinstance(step, int):
            offset = room.allocate(step)
            assert offset is not None or taken
            if offset is not None:
                assert offset not in taken and offset % ALIGN_BYTES == 0
                taken[offset] = step
        elif taken:
            offset = list(taken)[int(step * len(taken))]
            del taken[offset]
            room.free(offset)
            with pytest.raises(KeyError):
                room.free(offset)
        ends = [*sorted(taken.items()), (room.capacity_bytes, 0)]
        assert all(offset + size <= after for (offset, size), (after, _) in pairwise(ends))
    for offset in taken:
        room.free(offset)
    assert room.allocate(room.capacity_bytes) == 0


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


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_worker_that_dies_or_hangs_is_given_up_and_leaves_y_alone(doomed, is_killed):
    """At once if it was killed, and else after the timeout; closing ends one that hangs."""
    pool = doomed.patient if is_killed else doomed.hasty
    y = stop_one(pool)
    before, began = y.clone(), time.monotonic()
    killer = threading.Timer(0.05, os.kill, (pool.pids[0], signal.SIGKILL if is_killed else signal.SIGSTOP))
    killer.start()
    for reason in ("has ended" if is_killed else "in time", None):
        with pytest.raises(AssistLost, match=reason):
            pool.add(1, "m", y, random_rows(8, 256), 1.0)
    killer.join()
    assert torch.equal(y, before)
    assert not pool.is_alive
    for _ in range(2):
        pool.close()
    assert time.monotonic() - began < PATIENCE_S / 10
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
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", PARENT, case], cwd=ROOT, **pipes) as parent:
        watch = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    poller = select.poll()
    poller.register(watch, select.POLLIN)
    ended = poller.poll(10_000)
    os.close(watch)
    assert ended, "the worker outlived its parent"


@given(rows=st.integers(1, 5000), per_core=st.integers(1, 600), num_workers=st.integers(1, 64))
def test_rows_are_shared_out_evenly_and_no_worker_gets_few(rows, per_core, num_workers):
    assert [num_workers_for(num, 64, 4) for num in (1, 64, 65, 128, 129, 1000)] == [1, 1, 2, 2, 3, 4]
    used = num_workers_for(rows, per_core, num_workers)
    assert 1 <= used <= num_workers
    parts = split_rows(rows, used)
    sizes = [last - first for first, last in parts]
    assert [row for first, last in parts for row in range(first, last)] == list(range(rows))
    assert max(sizes) - min(sizes) <= 1
    assert used == 1 or min(sizes) >= MIN_ROWS
    if used < num_workers and rows >= MIN_ROWS * (used + 1):
        assert max(sizes) <= per_core
