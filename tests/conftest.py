"""Fixtures that several kinds of tests share."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).resolve().parent.parent
BROWSER = "tests/browser/"

# Before anything imports torch or vllm: the engine of the integration tests lives in this process.
for _name, _value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_COMPILE_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # A thread that waits for the next part of a step sleeps: looking for it all the time took half of the processor time of each engine.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Of the shared engine; the first engine of the process would set it otherwise, and some have room for one.
    "VLLM_MAX_N_SEQUENCES": "32",
    # As `configure_environment` sets them, for processes in which vLLM is imported before there is an engine.
    "VLLM_MAX_STOP_STRINGS": "65536",
    "VLLM_MAX_NUM_BAD_WORDS": "65536",
}.items():
    os.environ.setdefault(_name, _value)

# A proxy of this machine's is not asked for servers on it.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost,::1"

# No test is about time: what is slow here is the machine.
settings.register_profile("overture", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("overture")


class OneBrowser(LoadFileScheduling):
    """A file's tests in one process, and all that need a browser: they share one, and a gateway."""

    def _split_scope(self, nodeid: str) -> str:
        return BROWSER if nodeid.startswith(BROWSER) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneBrowser | None:
    return OneBrowser(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests without looking for garbage: what is made stays until the end, and looking through it took a quarter of the time."""
    from engine_bridge.driver.vllm_api.start import importing_vllm

    with importing_vllm():
        return (yield)
