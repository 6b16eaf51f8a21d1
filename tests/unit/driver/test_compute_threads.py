import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from engine_bridge.driver.corrections import compute_threads
from engine_bridge.driver.corrections.compute_threads import ComputeThreads

# As vLLM proposes n-gram drafts: numba's loop over the requests, with its own number of threads set around it.
PROPOSES = """
from engine_bridge.driver.engine.building import configure_environment
from engine_bridge.settings.engine_config import EngineConfig
configure_environment(EngineConfig(model="/nowhere", served_model_name="x", device="cpu", cpu_threads=1))
import numba, numpy, torch
torch.set_num_threads(1)

@numba.njit(parallel=True)
def propose(numbers):
    for at in numba.prange(numbers.shape[0]):
        numbers[at] += 1

before = numba.get_num_threads()
numba.set_num_threads(1)
propose(numpy.zeros(8))
numba.set_num_threads(before)
print(torch.get_num_threads())
"""


@pytest.fixture(autouse=True)
def number(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has had no engine."""
    monkeypatch.setattr(compute_threads, "_of_process", None)
    before = torch.get_num_threads()
    yield
    torch._C.set_num_threads(before)


@pytest.mark.parametrize("setting", [1, None])
def test_a_number_that_was_changed_is_mended(caplog: pytest.LogCaptureFixture, setting: int | None) -> None:
    torch._C.set_num_threads(1)
    threads = ComputeThreads(setting)
    threads.mend()
    for other in (3, 2):
        torch._C.set_num_threads(other)
        threads.mend()
        assert torch.get_num_threads() == 1
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("a library has set the engine's number of threads to 3;")


def test_numbas_parallel_loops_leave_the_number_alone() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_THREADING_LAYER"}
    command = [sys.executable, "-c", PROPOSES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split()[-1:] == ["1"], done.stderr
