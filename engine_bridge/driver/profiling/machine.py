"""A whole profile, part by part, within a given time."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from engine_bridge.adapters.errors import AdapterRejected
from engine_bridge.driver.engine.engine import VllmDriver
from engine_bridge.driver.engine.subject import subject_of
from engine_bridge.driver.in_process import kv_caches_of, ranks_of
from engine_bridge.driver.profiling.budget import Budget, ProgressReport, start
from engine_bridge.driver.profiling.copies import measure_copies
from engine_bridge.driver.profiling.disk import DiskUnmeasured, measure_disk
from engine_bridge.driver.profiling.requests import CraftedRequests, fill_kv
from engine_bridge.driver.profiling.steps import measure_steps
from engine_bridge.predict.steps import StepSample, fit_steps
from engine_bridge.settings.engine_config import EngineConfig
from engine_bridge.settings.profile import (
    AdapterProfile,
    CopyProfile,
    DiskProfile,
    MachineProfile,
    StepProfile,
)
from kvtiers.keys import BlockShape

# Shares of the time that is left when a part begins; the fit gets the rest. Steps get most, for they have three dimensions. Chosen.
DISK_SHARE, STEP_SHARE, ADAPTER_SHARE, COPY_SHARE = 0.08, 0.65, 0.5, 0.4
MEASURING_PREFIX = "measuring-"
# If equal steps differ by more than this, other programs used the machine meanwhile. Chosen: an idle virtual machine stays below a few per cent.
BUSY_REPEATABILITY = 0.15
GIB = 1 << 30


def profiling_config(config: EngineConfig) -> EngineConfig:
    """Return the configuration of the engine to measure: as it serves, without the parts that serve other requests.

    Those parts are tiers, lanes, adapters in KV and workers.
    """
    return replace(
        config,
        kv_host_gib=0.0,
        kv_disk_gib=0.0,
        scheduling_policy="vllm",
        adapters_in_kv=False,
        adapter_prefetch=False,
        cpu_assist_workers=0,
        profile_dir=None,
    )


def measure(
    driver: VllmDriver, config: EngineConfig, folder: Path, seconds: float, report: ProgressReport
) -> MachineProfile:
    """Measure an idle engine, built from `profiling_config`, in about `seconds`. On the thread that built it; afterwards it can only be closed.

    folder: on the disk that is to be measured, made if missing. A folder in it holds the files written meanwhile, and is removed however this ends.
    report: is told the progress. Raises ValueError where a model is too slow to take the samples that the fit needs.
    """
    started_s = time.monotonic()
    whole = start(seconds, report)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    notes: list[str] = []
    shape = _fill(driver)
    with tempfile.TemporaryDirectory(prefix=MEASURING_PREFIX, dir=folder) as scratch:
        disk = _disk(shape, Path(scratch), whole.part(DISK_SHARE), notes)
        with CraftedRequests(driver) as requests:
            samples = measure_steps(requests, whole.part(STEP_SHARE))
            adapters = _adapters(driver, config, requests, Path(scratch), whole.part(ADAPTER_SHARE), notes)
    copies = _copies(driver, whole.part(COPY_SHARE), notes)
    steps = _fit(samples, whole)
    if steps.repeatability is not None and steps.repeatability > BUSY_REPEATABILITY:
        notes.append(
            f"the machine was busy: equal steps differ by {steps.repeatability:.0%}; measure again while nothing else runs"
        )
    return MachineProfile(
        subject=subject_of(driver.engine),
        created_at=time.time(),
        seconds=time.monotonic() - started_s,
        steps=steps,
        copies=copies,
        disk=disk,
        adapters=adapters,
        notes=tuple(notes),
    )


def _fill(driver: VllmDriver) -> BlockShape:
    """Write numbers into the whole KV cache, and return the shape of a block: of all ranks together, where there are several."""
    ranks = ranks_of(driver.engine)
    if ranks is None:
        caches = kv_caches_of(driver.engine)
        fill_kv(caches)
        return BlockShape(len(caches), caches[0][0].numel() * caches[0].element_size())
    shapes = ranks.call("overture_fill_cache")
    num_layers, layer_bytes = shapes[0]
    return BlockShape(num_layers, layer_bytes * len(shapes))


def _copies(driver: VllmDriver, budget: Budget, notes: list[str]) -> CopyProfile | None:
    if ranks_of(driver.engine) is not None:
        notes.append("copies were not measured: a server of several ranks measures them while it is idle")
        return None
    return measure_copies(driver.engine, budget)


def _disk(shape: BlockShape, scratch: Path, budget: Budget, notes: list[str]) -> DiskProfile | None:
    folder = scratch / "disk"
    folder.mkdir()
    try:
        return measure_disk(folder, shape, budget)
    except (DiskUnmeasured, OSError) as error:
        notes.append(f"the disk was not measured: {error}")
        return None


def _adapters(
    driver: VllmDriver,
    config: EngineConfig,
    requests: CraftedRequests,
    scratch: Path,
    budget: Budget,
    notes: list[str],
) -> AdapterProfile | None:
    from engine_bridge.driver.profiling.adapters import AdaptersUnmeasured, measure_adapters

    if driver.adapters.contract is None:
        notes.append("adapters were not measured: LoRA is off")
        return None
    if ranks_of(driver.engine) is not None:
        notes.append("adapters were not measured: each rank reads its part of them")
        return None
    folder = scratch / "adapters"
    folder.mkdir()
    try:
        host_bytes = int(config.adapter_host_gib * GIB)
        return measure_adapters(driver, requests, folder, config.max_loras, host_bytes, budget)
    except (AdaptersUnmeasured, AdapterRejected, OSError) as error:
        notes.append(f"adapters were not measured: {error}")
        return None


def _fit(samples: Sequence[StepSample], budget: Budget) -> StepProfile:
    budget.say("fitting: step times")
    fit = fit_steps(samples)
    return StepProfile(
        grid=fit.table.grid(),
        error=fit.error,
        repeatability=fit.repeatability,
        num_samples=len(samples),
        num_held_out=fit.num_held_out,
    )
