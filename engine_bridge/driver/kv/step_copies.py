"""The copies of one step in the process that has the KV cache.

On a CPU they are made layer by layer, as the forward pass comes to them: layers of attention have hooks, so that what such a layer reads is loaded
before it, and what it has written is saved behind it. Recurrent layers have none, so with them all is loaded before the forward pass, and their
states are saved behind it. On a GPU all layers are treated so: copies run beside the kernels anyway, one call is quicker than one for each layer, and
hooks would keep vLLM from running a step as one CUDA graph. A region is the memory of one layer, or of one layer of each group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_bridge.driver.kv.layer_groups import Layers
    from engine_bridge.driver.memory.block_copy import BlockCopier


class StepCopies(ABC):
    """Which copies a step is to make, and which of them it has made.

    Args:
        by_layer: whether layers of attention are copied as the forward pass comes to them.
    """

    def __init__(self, layers: Layers, state_groups: Collection[int], *, by_layer: bool) -> None:
        self._layers, self._by_layer = layers, by_layer
        # Groups of which the hooks save nothing.
        self._saved_behind = set(state_groups) if by_layer else set(layers.places_of)
        self._loads_before = bool(state_groups) or not by_layer
        # By group: the device's blocks to save, and the host slots of each of them.
        self._saved_from: dict[int, tuple[list[int], list[list[int]]]] = {}
        self._loaded: set[int] = set()
        self._saved: set[tuple[int, int]] = set()

    @property
    @abstractmethod
    def copier(self) -> BlockCopier:
        """The copier of this process."""

    def begin_copies(self, saves: Iterable[tuple[int, int, list[int]]]) -> None:
        """Begin a step. saves: the group, the device's block and the host slots of each block to save."""
        self._loaded, self._saved, self._saved_from = set(), set(), {}
        for group, block_id, slots in saves:
            block_ids, of_blocks = self._saved_from.setdefault(group, ([], []))
            block_ids.append(block_id)
            of_blocks.append(slots)

    def start(self) -> None:
        """Load what the step loads, unless it is loaded layer by layer. Regions of recurrent layers may be attention's, too."""
        if self._loads_before and self.has_loads:
            for region in range(len(self._layers.regions)):
                self.load(region)
            self.copier.flush()

    @property
    @abstractmethod
    def has_loads(self) -> bool:
        """Whether the step loads anything."""

    def layer_begins(self, region: int) -> None:
        """Note that the forward pass comes to a layer of attention with this memory."""
        if self._by_layer:
            self.load(region)

    def layer_ends(self, group: int, region: int) -> None:
        """Note that the forward pass has computed the attention of a group's layer with this memory."""
        if self._by_layer:
            self.save(group, region)

    def load(self, region: int) -> None:
        """Copy a region of all blocks to load to the device."""
        if region not in self._loaded:
            self._loaded.add(region)
            self.load_region(region)

    @abstractmethod
    def load_region(self, region: int) -> None:
        """Copy a region of all blocks to load to the device. Called once for each region of a step."""

    def save(self, group: int, region: int) -> None:
        """Copy a region of a group's finished blocks to host memory."""
        if group in self._saved_from and (group, region) not in self._saved:
            block_ids, slots = self._saved_from[group]
            self.copier.to_host(region, block_ids, [of_block[region] for of_block in slots])
            self._saved.add((group, region))

    def save_rest(self) -> None:
        """Save what no hook has saved, once the forward pass is behind all layers."""
        for group in self._saved_behind:
            for _, region in self._layers.places_of[group]:
                self.save(group, region)

    @property
    def has_saved_all(self) -> bool:
        """Whether each layer of the blocks to save has been copied. After a forward pass that has failed the last ones are missing.

        On a CPU vLLM ends that pass like any other; on a GPU it does not end it.
        """
        return all(self._saved >= self._layers.places_of[group] for group in self._saved_from)
