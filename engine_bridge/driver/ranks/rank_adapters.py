"""A rank's side of the adapters: it reads them, keeps its part of each in host memory, and fills slots with it. What goes where is decided elsewhere.

The engine's process calls from its loader's thread, beside the steps, through a connection of its own; a slot is filled by a call between two steps.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Listener
from typing import Any

import torch

from engine_bridge.adapters.errors import AdapterRejected
from engine_bridge.adapters.registry import AdapterRecord
from engine_bridge.driver.adapters import slots as slot_kinds
from engine_bridge.driver.adapters.weights import (
    AdapterWeights,
    Loader,
    ModuleWeights,
    contract_facts,
    contract_from,
    is_split,
    part_of,
)


class NoResidency:
    """Stands in for `Residency` in a rank: slots are filled before the step that needs them."""

    def enter(self, adapter_ids: Any) -> None:
        """Do nothing."""


class RankAdapters:
    """The adapters of one rank.

    Args:
        worker_manager: our manager in vLLM's model runner (`adapters/seam.py`).
        base_models: names and paths under which adapters may know the model.
        max_idle_bytes: bound of the memory kept for later loads.
    """

    def __init__(self, worker_manager: Any, base_models: tuple[str, ...], max_idle_bytes: int) -> None:
        self._manager = worker_manager._adapter_manager
        self.facts = contract_facts(self._manager)
        self._manager.remove_all_adapters()  # those of vLLM's warm-up
        self._slots = slot_kinds.make_slots(self._manager)
        self._copy = ""
        self._loader = Loader(
            self._manager,
            contract_from(self.facts, base_models),
            worker_manager.vocab_size,
            max_idle_bytes,
            lambda content_hash: self._copy,
        )
        self._pins = torch.device(self._manager.device).type == "cuda"
        # By the number of the load, so that letting go of one cannot meet the next load of the same adapter.
        self._held: dict[int, AdapterWeights] = {}
        # Found once: `fill` changes what layers say of themselves while adapters are read on the other thread.
        self._split = {name: layer for name, layer in self._manager.modules.items() if is_split(layer)}
        worker_manager.residency = NoResidency()

    @property
    def num_slots(self) -> int:
        """The number of slots."""
        return len(self._manager.lora_index_to_id)

    # -- beside the steps --------------------------------------------------------------------------------------------

    def serve(self, authkey: bytes) -> str:
        """Begin to answer the engine's process on a thread. Returns the address where it connects, with this key."""
        # An abstract socket name has no file, so none is left behind however this process ends.
        address = f"\0overture-{uuid.uuid4().hex}"
        listener = Listener(address, "AF_UNIX", authkey=authkey)
        threading.Thread(target=self._serve, args=(listener,), name="rank-adapters", daemon=True).start()
        return address

    def _serve(self, listener: Listener) -> None:
        torch._C.set_num_threads(1)  # of this thread: see `adapters/loading.py`
        if self._pins:
            torch.cuda.set_device(self._manager.device)  # of this thread: see `rank_copies.thread_on`
        with listener, listener.accept() as connection:
            while self._answer(connection):
                pass

    def _answer(self, connection: Connection) -> bool:
        """Carry out one call. Returns False when the engine's process has hung up."""
        try:
            name, arguments = connection.recv()
        except (EOFError, OSError):
            return False
        try:
            answer = True, getattr(self, name)(*arguments)
        except AdapterRejected as error:
            answer = False, (str(error), error.code)
        except Exception as error:
            answer = False, (f"{type(error).__name__}: {error}", None)
        connection.send(answer)
        return True

    def load(self, number: int, record: AdapterRecord, copy: str) -> int:
        """Read an adapter, and keep this rank's part of it under a number. Returns the part's bytes.

        copy: the path of a copy of its files; "" for none. Raises AdapterRejected: its files cannot be used.
        """
        self._copy = copy
        whole = self._loader.load(record)
        modules = {name: self._part(name, module) for name, module in whole.modules.items()}
        if whole.buffer is not None:
            self._loader.buffers.give_back(whole.buffer)
        tensors = [tensor for module in modules.values() for tensor in module.tensors()]
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        self._held[number] = AdapterWeights(modules, num_bytes, None)
        return num_bytes

    def _part(self, name: str, module: ModuleWeights) -> ModuleWeights:
        part = part_of(self._split[name], module) if name in self._split else module
        a, b = (
            tuple(None if each is None else self._own(each) for each in half) for half in (part.a, part.b)
        )
        return ModuleWeights(a, b, part.is_list)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        return (
            tensor.contiguous().pin_memory()
            if self._pins
            else tensor.clone(memory_format=torch.contiguous_format)
        )

    def drop(self, number: int) -> None:
        """Release the part loaded under this number; an unknown number changes nothing."""
        self._held.pop(number, None)

    # -- between two steps -------------------------------------------------------------------------------------------

    def fill(self, slot: int, adapter_id: int, number: int) -> None:
        """Make the steps from here on compute rows of a slot with this adapter, loaded under this number. On a GPU they wait for its copy."""
        ids = self._manager.lora_index_to_id
        for other, held in enumerate(ids):
            if held == adapter_id:
                ids[other] = None
        ids[slot] = adapter_id
        with _as_whole(self._split.values()):
            self._slots.fill(slot, self._held[number])
        if self._slots.fills_beside_steps:
            self._slots.wait(slot)
        else:
            self._slots.finish(slot)


@contextmanager
def _as_whole(split: Collection[Any]) -> Iterator[None]:
    """Let split layers take weights as they are: these are their part already."""
    sizes = [layer.tp_size for layer in split]
    for layer in split:
        layer.tp_size = 1
    try:
        yield
    finally:
        for layer, size in zip(split, sizes, strict=True):
            layer.tp_size = size
