"""vLLM's KV connector for an engine of several ranks: the scheduler's side is that of any engine, the workers' side is in each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_bridge.core.kv.step_moves import StepMoves
from engine_bridge.driver.kv.kv_connector import StepMetadata, TieredConnector, copies_of
from engine_bridge.driver.kv.kv_tiers import settle
from engine_bridge.driver.ranks.calls import RanksCopier
from engine_bridge.driver.ranks.messages import RankMoves, StepAnswers
from engine_bridge.driver.ranks.rank_copies import RankCopies
from engine_bridge.driver.vllm_api import KVConnectorMetadata, KVConnectorRole

if TYPE_CHECKING:
    from engine_bridge.driver.kv.layer_groups import Layers


class RanksConnector(TieredConnector):
    """Sends a step's loads and saves to the ranks as numbers, and ends them when all ranks have copied."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._steps = SentSteps(vllm_config.parallel_config.world_size)

    # -- the scheduler's side ------------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Decide what the scheduled step loads and saves, in the ranks' form."""
        meta = super().build_connector_meta(scheduler_output)
        assert isinstance(meta, StepMetadata)
        return StepMetadata(self._steps.send(meta.moves))

    def update_connector_output(self, connector_output: Any) -> None:
        """Take over the ranks' answers."""
        super().update_connector_output(connector_output)
        answers = connector_output.kv_connector_worker_meta
        if isinstance(answers, StepAnswers):
            self.hear(answers)

    @property
    def is_waiting(self) -> bool:
        """Whether a step was sent whose copies not all ranks have said to have made. On a GPU they copy on after the step."""
        return self._steps.num_open > 0

    def hear(self, answers: StepAnswers) -> None:
        """End the steps that all ranks have copied for by now, and count the copies."""
        store = self._tiers.store
        for moves, is_right in self._steps.ended(answers):
            assert store is not None
            settle(store, moves, is_right=is_right)
            self._tiers.end_moves(moves)
        if isinstance(self._tiers.copier, RanksCopier):
            self._tiers.copier.hear(answers.made)
        self._tiers.hear_copies()

    # -- a rank's side -------------------------------------------------------------------------------------------------

    def begin_work(self, layers: Layers) -> RankCopies:
        """Return what copies in this rank's steps. The engine's process attaches it to the shared region."""
        self.copies = RankCopies(layers, self._layout.state_groups, by_layer=self._by_layer)
        return self.copies

    def build_connector_worker_meta(self) -> StepAnswers | None:
        """Return what this rank has copied since the last step; None for nothing."""
        return self.copies.take_answers()


class SentSteps:
    """The steps whose copies the ranks have been told of, and not yet all made.

    Args:
        num_ranks: how many ranks answer.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._last = 0
        self._open: dict[int, StepMoves] = {}
        self._answered: dict[int, int] = {}
        self._failed: set[int] = set()

    @property
    def num_open(self) -> int:
        """The number of these steps."""
        return len(self._open)

    def send(self, moves: StepMoves) -> RankMoves:
        """Return a step's moves in the ranks' form, and keep them until all have answered."""
        sent = RankMoves(saves=list(copies_of(moves)))
        for load in moves.loads:
            assert load.is_whole, "a rank waits for no layer: see KvTiers.loads_must_hold"
            sent.load_blocks += load.block_ids
            sent.load_slots += [load.stage.blocks[position].slots for position in load.positions]
        if moves.loads or moves.saves:
            self._last += 1
            sent.number = self._last
            self._open[sent.number] = moves
        return sent

    def ended(self, answers: StepAnswers) -> list[tuple[StepMoves, bool]]:
        """Return the steps that all ranks have copied for by now, and whether each of them made all its copies."""
        self._failed |= answers.failed
        done = []
        for number, num_answers in answers.ended.items():
            self._answered[number] = self._answered.get(number, 0) + num_answers
            if self._answered[number] == self._num_ranks:
                del self._answered[number]
                done.append((self._open.pop(number), number not in self._failed))
                self._failed.discard(number)
        return done
