"""Measures the cost of LoRA adapters on this machine: of loading them, and in a decode step. It makes adapters of random weights for that."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from engine_bridge.adapters.catalog import Catalog, open_registry
from engine_bridge.adapters.files import PEFT_PREFIX, ModelContract
from engine_bridge.adapters.header import WEIGHTS_FILE
from engine_bridge.adapters.registry import AdapterRecord
from engine_bridge.driver.adapters.seam import worker_manager_of
from engine_bridge.driver.adapters.weights import Loader
from engine_bridge.driver.engine.engine import VllmDriver
from engine_bridge.driver.kv.kv_keys import version_of
from engine_bridge.driver.profiling.budget import Budget
from engine_bridge.driver.profiling.disk import drop_cached
from engine_bridge.driver.profiling.requests import CraftedRequests
from engine_bridge.settings.profile import AdapterProfile, LinearCost

# Source: the ranks of Chameleon §5.1.
RANKS = (8, 16, 32, 64, 128)
# The modules that most adapters change; for a model without these, all modules that can be changed.
USUAL_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
LORA_ALPHA = 16
SPREAD = 1e-3  # the spread of the weights: small, so that no sum overflows
LOAD_SHARE = 0.25
MIN_LOADS, MAX_LOADS = 3, 60
STEPS_EACH = 5
# Sets of adapters, each timed repeatedly while there is time, at most MAX_ROUNDS times: noise is larger than what an adapter adds.
NUM_SETS, MIN_SETS, MAX_ROUNDS = 12, 5, 100
CONTEXT_TOKENS = 64
# How long to wait for adapters to come to where steps compute with them. Chosen: far beyond any load; on a busy machine at least MIN_WAIT_STEPS steps
# are waited.
MAX_WAIT_S, MIN_WAIT_STEPS, MAX_WAIT_STEPS = 10.0, 20, 500


class AdaptersUnmeasured(Exception):
    """Adapters cannot be computed with here. The message says why."""


class _Adapter(NamedTuple):
    record: AdapterRecord
    request: Any  # LoRARequest


def measure_adapters(
    driver: VllmDriver,
    requests: CraftedRequests,
    folder: Path,
    max_loras: int,
    max_bytes: int,
    budget: Budget,
) -> AdapterProfile:
    """Measure how fast adapters load, and how much they add to a decode step.

    driver: an engine without other requests. folder: an empty folder that the caller removes. max_loras: the most adapters in one step. max_bytes: of
    the adapters in host memory. Raises AdaptersUnmeasured, AdapterRejected, OSError: the message says why adapters cannot be measured.
    """
    contract = driver.adapters.contract
    assert contract is not None
    budget.say("adapters: making some")
    ranks = [rank for rank in RANKS if rank <= contract.max_rank] or [contract.max_rank]
    modules, dtype = _modules(contract), driver.engine.vllm_config.model_config.dtype
    catalog = Catalog(open_registry(None), contract, max_bytes)
    try:
        adapters = []
        for number in range(max(max_loras, len(ranks))):
            rank = ranks[number % len(ranks)]
            path = folder / f"adapter-{number}"
            _write_adapter(path, modules, rank, dtype, seed=number)
            adapters.append(_adapter(catalog.add(path.name, str(path)), path))
            if 2 * sum(adapter.record.num_bytes for adapter in adapters) > max_bytes:
                break  # they are to stay in host memory while steps are timed
        rate = _load_rate(driver, contract, adapters, max_bytes, budget.part(LOAD_SHARE))
        return _with_steps(driver, requests, adapters, max_loras, rate, budget)
    finally:
        catalog.close()


def _modules(contract: ModelContract) -> dict[str, tuple[int, int]]:
    usual = {n: s for n, s in contract.modules.items() if n.rpartition(".")[2] in USUAL_MODULES}
    return usual or {n: s for n, s in contract.modules.items() if n not in contract.embedding_modules}


def _write_adapter(
    folder: Path, modules: dict[str, tuple[int, int]], rank: int, dtype: torch.dtype, seed: int
) -> None:
    from safetensors.torch import save_file

    # One draw serves all modules: drawing each weight would take longer than everything else.
    most = rank * max(max(shape) for shape in modules.values())
    drawn = torch.randn(most, generator=torch.Generator().manual_seed(seed)).mul_(SPREAD).to(dtype)
    tensors = {}
    for module, (num_in, num_out) in modules.items():
        for half, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
            weights = drawn[: shape[0] * shape[1]].view(shape)
            tensors[f"{PEFT_PREFIX}{module}.lora_{half}.weight"] = weights.clone()
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": LORA_ALPHA,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _adapter(record: AdapterRecord, path: Path) -> _Adapter:
    from engine_bridge.driver.vllm_api import LoRARequest

    request = LoRARequest(lora_name=record.name, lora_int_id=record.version_id, lora_path=str(path))
    return _Adapter(record, version_of(request, record.content_hash))


def _load_rate(
    driver: VllmDriver, contract: ModelContract, adapters: Sequence[_Adapter], max_bytes: int, budget: Budget
) -> float:
    """Return the bytes per second from the disk to laid-out weights in host memory, by the loader that serves."""
    manager = worker_manager_of(driver.engine)
    loader = Loader(manager._adapter_manager, contract, manager.vocab_size, max_bytes // 4)
    num_bytes, elapsed_s = 0, 0.0
    for number in range(MAX_LOADS):
        if number >= MIN_LOADS and budget.is_over():
            break
        record = adapters[number % len(adapters)].record
        budget.say(f"adapters: loading one of rank {record.rank}")
        drop_cached(Path(record.path) / WEIGHTS_FILE)
        started_s = time.perf_counter()
        weights = loader.load(record)
        elapsed_s += time.perf_counter() - started_s
        num_bytes += weights.num_bytes
        if weights.buffer is not None:
            loader.buffers.give_back(weights.buffer)
    return num_bytes / elapsed_s


def _with_steps(
    driver: VllmDriver,
    requests: CraftedRequests,
    adapters: Sequence[_Adapter],
    max_loras: int,
    load_rate: float,
    budget: Budget,
) -> AdapterProfile:
    """Time decode steps with sets of adapters, each beside the same step without: the machine may have changed its speed between two sets.

    The lines go through the sets' medians.
    """
    for adapter in adapters:
        driver.adapters.add(adapter.record)
    most = min(max_loras, len(adapters), requests.num_seqs)
    chance = random.Random(0)
    sets = [chance.sample(list(adapters), 1 + number % most) for number in range(NUM_SETS)]
    added: list[list[float]] = [[] for _ in sets]
    for number in range(NUM_SETS * MAX_ROUNDS):
        if number >= MIN_SETS and budget.is_over():
            break
        chosen = sets[number % NUM_SETS]
        ranks = sorted(adapter.record.rank for adapter in chosen)
        budget.say(f"adapters: decoding with ranks {', '.join(map(str, ranks))}")
        # The order alternates, so that changes of the machine's speed within a pair even out.
        is_first = (number // NUM_SETS) % 2 == 0
        seconds = {
            is_with: _decode_s(driver, requests, chosen, is_with) for is_with in (is_first, not is_first)
        }
        added[number % NUM_SETS].append(seconds[True] - seconds[False])
    for adapter in adapters:
        driver.adapters.remove(adapter.record.version_id)
    costs = [statistics.median(found) for found in added if found]
    of_sets = [[adapter.record.rank for adapter in chosen] for chosen in sets[: len(costs)]]
    return AdapterProfile(
        load_bytes_per_s=load_rate,
        bgmv=fit_line([len(ranks) * max(ranks) for ranks in of_sets], costs),
        mbgmv=fit_line([sum(ranks) for ranks in of_sets], costs),
        num_steps=2 * STEPS_EACH * sum(map(len, added)),
    )


def _decode_s(
    driver: VllmDriver, requests: CraftedRequests, chosen: Sequence[_Adapter], is_with: bool
) -> float:
    """Return the median seconds of a step in which one request for each adapter decodes; without `is_with`, requests of the base model do."""
    try:
        for adapter in chosen:
            requests.add(CONTEXT_TOKENS, 1, MAX_WAIT_STEPS + STEPS_EACH, adapter.request if is_with else None)
        _settle(driver, requests, len(chosen))
        return statistics.median(requests.step().seconds for _ in range(STEPS_EACH))
    finally:
        requests.clear()


def _settle(driver: VllmDriver, requests: CraftedRequests, num_decodes: int) -> None:
    """Step until all requests decode and no adapter is on its way to a slot any more."""
    residency = driver.adapters
    assert residency is not None
    give_up_s = time.monotonic() + MAX_WAIT_S
    for number in range(MAX_WAIT_STEPS):
        if number > MIN_WAIT_STEPS and time.monotonic() > give_up_s:
            break
        if residency.has_work():
            residency.advance()
        sample = requests.step()
        if sample.work[:2] == (0, num_decodes) and not residency.has_work():
            return
        if sum(sample.work[:2]) == 0:
            time.sleep(0.001)  # the loader's thread wants the processor
    raise AdaptersUnmeasured("they did not come to where steps compute with them")


def fit_line(xs: Sequence[float], seconds: Sequence[float]) -> LinearCost:
    """Fit a line by least squares. Costs that noise made negative stay in: leaving them out would raise the line."""
    x, y = np.array(xs, dtype=np.float64), np.array(seconds)
    if np.ptp(x) == 0:
        return LinearCost(a=0.0, b=float(y.mean()), r2=1.0 if np.ptp(y) == 0 else 0.0)
    a, b = np.polyfit(x, y, 1)
    total = float(((y - y.mean()) ** 2).sum())
    left = float(((y - a * x - b) ** 2).sum())
    return LinearCost(a=float(a), b=float(b), r2=1 - left / total if total else 1.0)
