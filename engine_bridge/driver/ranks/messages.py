"""What the engine's process and its ranks tell each other about copies of KV: plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_bridge.driver.vllm_api import KVConnectorWorkerMetadata
from engine_bridge.policy.costs.costs import Copied


@dataclass
class RankMoves:
    """The loads and saves of one step.

    Attributes:
        number: the step's number, by which ranks answer; 0 for a step that moves nothing.
        load_blocks, load_slots: the device's blocks to load, and the host slots of each, one for each region.
        saves: the group, the device's block and the host slots of each block to save.
    """

    number: int = 0
    load_blocks: list[int] = field(default_factory=list)
    load_slots: list[list[int]] = field(default_factory=list)
    saves: list[tuple[int, int, list[int]]] = field(default_factory=list)


@dataclass
class RegionCopy:
    """A copy between two steps: the part of `blocks` that one region has, to or from `slots` of host memory."""

    is_to_device: bool
    region: int
    blocks: list[int]
    slots: list[int]


@dataclass
class CopiesMade:
    """Copies of one rank, or of several at the same time, since they last told."""

    out: Copied = field(default_factory=Copied)
    back: Copied = field(default_factory=Copied)

    def beside(self, other: CopiesMade) -> CopiesMade:
        """Return the copies of both."""
        return CopiesMade(self.out.beside(other.out), self.back.beside(other.back))


@dataclass
class StepAnswers(KVConnectorWorkerMetadata):
    """Which copies are made, of steps and between two.

    Attributes:
        ended: by the number of a step or of a call, how many ranks have made all its copies.
        failed: the numbers of those of which a rank did not make all copies.
        made: the copies themselves.
    """

    ended: dict[int, int]
    failed: set[int]
    made: CopiesMade

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return the answers of the ranks of both. vLLM calls it for each rank's answer."""
        assert isinstance(other, StepAnswers)
        return self.beside(other)

    def beside(self, other: StepAnswers) -> StepAnswers:
        """Return the answers of the ranks of both."""
        numbers = self.ended.keys() | other.ended.keys()
        ended = {number: self.ended.get(number, 0) + other.ended.get(number, 0) for number in numbers}
        return StepAnswers(ended, self.failed | other.failed, self.made.beside(other.made))
