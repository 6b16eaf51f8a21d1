"""The adapters of an engine of several ranks: its residency decides as any does, and the ranks read, keep and use them, each its part."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from types import SimpleNamespace
from typing import Any

import torch

from engine_bridge.adapters.errors import AdapterRejected
from engine_bridge.adapters.registry import AdapterRecord
from engine_bridge.driver.adapters.blocks import NoBlocks
from engine_bridge.driver.adapters.build import GIB, AdapterParts
from engine_bridge.driver.adapters.host_path import NoHostPath
from engine_bridge.driver.adapters.host_workers import AssistWorkers
from engine_bridge.driver.adapters.layouts import Layout
from engine_bridge.driver.adapters.slots import ComputeFor, Slots
from engine_bridge.driver.adapters.weights import AdapterWeights, contract_from, host_buffers
from engine_bridge.driver.ranks import calls
from engine_bridge.driver.ranks.calls import RankError, Ranks
from engine_bridge.settings.engine_config import EngineConfig

log = logging.getLogger(__name__)


def rank_parts(
    engine: Any, ranks: Ranks, config: EngineConfig, copy_of: Callable[[str], str]
) -> AdapterParts:
    """Return the parts of an engine of these ranks. For `copy_of` see `Loader`.

    Raises:
        RankError: a rank cannot hold adapters.
        OSError: a rank cannot be reached.
    """
    log.info(
        "requests wait until every rank has their adapter in a slot, and no adapter is kept in KV memory: the model is split over %d devices",
        config.tensor_parallel_size,
    )
    base_models = config.model, *config.model_names
    authkey = os.urandom(32)
    idle_bytes = int(config.adapter_host_gib * GIB) // (4 * config.tensor_parallel_size)
    found = ranks.call("overture_adapters", base_models, idle_bytes, authkey)
    facts, num_slots, _ = found[0]
    table = SimpleNamespace(lora_index_to_id=[None] * num_slots)
    host = RankHost(ranks, [Client(address, authkey=authkey) for _, _, address in found])
    scheduler = engine.engine_core.engine_core.scheduler
    return AdapterParts(
        contract=contract_from(facts, base_models),
        table=table,
        slots=RankSlots(ranks, table),
        loader=RankLoader(host, ranks, copy_of),
        workers=host,
        host_path=NoHostPath(),
        device=torch.device("cpu"),  # what the engine's process holds of an adapter has no weights
        may_assist=False,
        step_room=None,  # slots are of one size, so that their number is the bound; vLLM bounds the adapters of a step
        make_blocks=lambda copies: NoBlocks(),
        enter=lambda residency: setattr(scheduler, "enters_adapters", True),
    )


class RankHost(AssistWorkers):
    """The adapters that the ranks hold in host memory: calls them beside the steps, on the loader's thread.

    Args:
        ranks: the same ranks, between two steps.
    """

    def __init__(self, ranks: Ranks, connections: Sequence[Connection]) -> None:
        self._ranks, self._connections = ranks, connections

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """Call a method of `RankAdapters` in each rank, and return the answers.

        Raises:
            AdapterRejected: a rank says so.
            RankError: a rank has ended, could not do it, or does not answer, which fails the engine.
        """
        if self._ranks.has_failed:
            raise RankError("a rank of the engine has failed or ended")
        try:
            for each in self._connections:
                each.send((name, arguments))
            ends_s = time.monotonic() + calls.CALL_S
            answers = [self._answer(each, ends_s) for each in self._connections]
        except (EOFError, OSError) as error:
            raise RankError("a rank of the engine has ended") from error
        for is_right, answer in answers:
            if not is_right:
                text, code = answer
                raise AdapterRejected(text, code=code) if code is not None else RankError(text)
        return [answer for _, answer in answers]

    def _answer(self, connection: Connection, ends_s: float) -> Any:
        if not connection.poll(max(ends_s - time.monotonic(), 0)):
            # What it will say, if it does, would be taken for the answer to the next call.
            silent = RankError(f"a rank of the engine has not read an adapter in {calls.CALL_S:.0f} s")
            self._ranks.give_up(silent)
            raise silent
        return connection.recv()

    def close(self) -> None:
        """Hang up."""
        for each in self._connections:
            each.close()


class RankLoader:
    """A loader by which all ranks read adapters. On the loader's thread. ranks: the same ranks, between two steps."""

    def __init__(self, host: RankHost, ranks: Ranks, copy_of: Callable[[str], str]) -> None:
        self._host, self._ranks, self._copy_of = host, ranks, copy_of
        self._numbers = itertools.count(1)
        self.buffers = host_buffers(False, 0)

    def load(self, record: AdapterRecord) -> AdapterWeights:
        """Have each rank read an adapter and keep its part. Returns weights without tensors, of the bytes of all parts.

        Raises:
            AdapterRejected: its files cannot be used.
            RankError: a rank has ended.
        """
        number = next(self._numbers)
        try:
            num_bytes = sum(self._host.call("load", number, record, self._copy_of(record.content_hash)))
        except Exception:
            with suppress(RankError):
                self._host.call("drop", number)  # another rank may have it
            raise
        return AdapterWeights({}, num_bytes, None, number, lambda: self._release(number))

    def _release(self, number: int) -> None:
        """Have the ranks let go of an adapter, behind the calls by which they fill slots with it."""
        self._ranks.send("overture_drop", number, then=lambda answers: None)


class RankSlots(Slots):
    """The slots of all ranks. A slot is filled before the next step, in every rank.

    Args:
        table: has the slot table, in which a slot's adapter stands before the slot is filled.
    """

    def __init__(self, ranks: Ranks, table: Any) -> None:
        self._ranks, self._table = ranks, table
        self.on_failed = None

    def fill(
        self,
        slot: int,
        weights: AdapterWeights,
        compute_for: ComputeFor | None = None,
        layout: Layout | None = None,
    ) -> None:
        """Have the ranks fill a slot before the next step."""
        adapter_id = self._table.lora_index_to_id[slot]
        self._ranks.send("overture_fill", slot, adapter_id, weights.load_number, then=lambda answers: None)
