"""vLLM's KV connector for an engine of several ranks: the scheduler's side is that of any engine, the workers' side is in each rank."""

from __future__ import annotations

import functools
from typing import Any

from engine_bridge.core.kv.step_moves import StepMoves
from engine_bridge.driver.kv.kv_connector import StepMetadata, TieredConnector, copies_of
from engine_bridge.driver.kv.kv_tiers import settle
from engine_bridge.driver.kv.layer_groups import Layers
from engine_bridge.driver.ranks.calls import RanksCopier
from engine_bridge.driver.ranks.messages import RankMoves, StepAnswers
from engine_bridge.driver.ranks.rank_copies import RankCopies
from engine_bridge.driver.vllm_api import KVConnectorMetadata


class RanksConnector(TieredConnector):
    """Sends a step's loads and saves to the ranks as numbers, and ends them when all ranks have copied."""

    # -- the scheduler's side ------------------------------------------------------------------------------------------

    @property
    def _copier(self) -> RanksCopier:
        copier = self._tiers.copier
        assert isinstance(copier, RanksCopier)
        return copier

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Decide what the scheduled step loads and saves, in the ranks' form."""
        meta = super().build_connector_meta(scheduler_output)
        assert isinstance(meta, StepMetadata)
        sent = in_numbers(meta.moves)
        if meta.moves.loads or meta.moves.saves:
            sent.number = self._copier.sent.begin(functools.partial(self._ended, meta.moves))
        return StepMetadata(sent)

    def _ended(self, moves: StepMoves, is_right: bool) -> None:
        """Note that all ranks have made the copies of a step, or that one could not."""
        store = self._tiers.store
        assert store is not None
        settle(store, moves, is_right=is_right)
        self._tiers.end_moves(moves)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take over the ranks' answers."""
        super().update_connector_output(connector_output)
        answers = connector_output.kv_connector_worker_meta
        if isinstance(answers, StepAnswers):
            self._copier.hear(answers)
            self._tiers.hear_copies()

    # -- a rank's side -------------------------------------------------------------------------------------------------

    def begin_work(self, layers: Layers) -> RankCopies:
        """Return what copies in this rank's steps. The engine's process attaches it to the shared region."""
        self.copies = RankCopies(layers, self._layout.state_groups, by_layer=self._by_layer)
        return self.copies

    def build_connector_worker_meta(self) -> StepAnswers | None:
        """Return what this rank has copied since the last step; None for nothing."""
        return self.copies.take_answers()


def in_numbers(moves: StepMoves) -> RankMoves:
    """Return a step's moves in the ranks' form."""
    sent = RankMoves(saves=list(copies_of(moves)))
    for load in moves.loads:
        assert load.is_whole, "a rank waits for no layer: see KvTiers.loads_must_hold"
        sent.load_blocks += load.block_ids
        sent.load_slots += [load.stage.blocks[position].slots for position in load.positions]
    return sent
