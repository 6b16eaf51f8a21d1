import subprocess
import sys
from pathlib import Path

PATIENCE_S = 60.0

COLLECTS = """
import gc
from engine_bridge.process_end import stop_collecting
ring = [[] for _ in range(100_000)]
for each in ring:
    each.append(each)
collected = []
gc.callbacks.append(lambda phase, info: collected.append(phase))
stop_collecting()
gc.unfreeze()  # as vLLM does when an engine is shut down
gc.collect()
ring = [[[]] for _ in range(100_000)]
print(collected)
"""

LEAVES = """
import atexit, sys, tempfile, threading, weakref
from multiprocessing import resource_tracker, shared_memory
from engine_bridge.process_end import leave
folder = tempfile.TemporaryDirectory()
memory = shared_memory.SharedMemory(create=True, size=1 << 16)
print(folder.name, memory.name, flush=True)
atexit.register(lambda: print("at the end"))
def raises():
    raise RuntimeError("of a library's")
atexit.register(raises)
threading.Thread(target=threading.Event().wait).start()  # no daemon: the interpreter would wait for it for ever
sys.stdout.write("not flushed yet\\n")
leave(3)
"""

HANGS = """
import threading
from engine_bridge.process_end import leave_within
leave_within(0.2)
threading.Event().wait()
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)


def test_nothing_is_collected_any_more_whoever_asks_for_it() -> None:
    done = run(COLLECTS)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_what_is_registered_for_the_end_is_run_and_nothing_is_left() -> None:
    done = run(LEAVES)
    folder, memory = done.stdout.splitlines()[0].split()
    assert done.returncode == 3
    assert done.stdout.splitlines()[1:] == ["not flushed yet", "at the end"]
    assert not Path(folder).exists()
    assert not Path("/dev/shm", memory.lstrip("/")).exists(), "the tracker of the process has freed it"


def test_what_hangs_is_left_after_a_time() -> None:
    assert run(HANGS).returncode == 1


def test_where_no_thread_can_be_started_closing_goes_on() -> None:
    script = "import threading\nfrom engine_bridge.process_end import leave, leave_within\n"
    script += 'def none(self): raise RuntimeError("can\'t start new thread")\n'
    script += "threading.Thread.start = none\nleave_within(9)\nleave(7)"
    assert run(script).returncode == 7
