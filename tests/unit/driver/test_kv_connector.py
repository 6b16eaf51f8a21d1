"""What a step that loads and saves leaves in host memory, whatever becomes of it; over a real store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from engine_bridge.core.kv.kv_transfers import SaveJob, StepMoves
from engine_bridge.core.kv.restoring import LoadBlocks
from engine_bridge.driver.engine.engine import VllmDriver
from engine_bridge.driver.kv.kv_connector import _gives_blocks_up, _Step
from kvtiers.blocks import Stage
from kvtiers.io.io_thread import IoThread
from kvtiers.keys import BlockKey

from .test_promoter import SHAPE, Bench, content, keys_of

READ = [BlockKey(key) for key in keys_of("read", 2)]
SAVED = [BlockKey(key) for key in keys_of("saved", 2)]


class Stepped(Bench):
    """A step that is to load two blocks from disk and to save two."""

    def __init__(self, io: IoThread, folder: Path) -> None:
        super().__init__(io, folder)
        self.folder, self.step = folder, _Step(self.tiers)
        self.save("read", READ)
        self.store.flush()
        self.store.drop_host()

    def begin(self) -> Stage:
        stage = self.store.stage("read", READ)
        self.store.wait_for_reads(10)
        save = self.store.begin_save("saved", SAVED)
        self.moves = StepMoves([LoadBlocks(stage, [0, 1], [1, 2], is_whole=False)], [SaveJob(save, [3, 4])])
        self.tiers.begin_moves(self.moves)
        self.step.begin(self.moves)
        return stage

    def run(self, num_layers: int = SHAPE.num_layers) -> None:
        for layer in range(num_layers):
            self.step.load(layer)
            self.step.save(layer)

    def damage(self) -> None:
        for path in self.folder.glob("segment-*.kv"):
            path.write_bytes(bytes(path.stat().st_size))

    @property
    def num_saved(self) -> int:
        """Once the device has done what it was told. Nothing is in use any more then."""
        self.copier.catch_up()
        self.store.check_invariants()
        assert not any(block.pins for block in self.store._host.blocks.values())
        return self.store.num_held(SAVED)


@pytest.fixture
def stepped(tmp_path: Path) -> Iterator[Stepped]:
    io = IoThread("test-io")
    stepped = Stepped(io, tmp_path)
    yield stepped
    stepped.store.close()
    io.close()


def test_what_a_step_saves_is_kept(stepped: Stepped) -> None:
    stepped.begin()
    stepped.run()
    stepped.step.end()
    assert not stepped.step.take_failed()
    assert stepped.num_saved == 2


def test_what_a_step_saves_that_was_spoiled_is_not_kept_and_the_next_ones_is(stepped: Stepped) -> None:
    """One of its adapters could not be laid out, so its rows are not what their keys say."""
    stepped.begin()
    stepped.tiers.is_step_spoiled = True
    stepped.run()
    stepped.step.end()
    assert stepped.num_saved == 0
    stepped.begin()
    stepped.run()
    stepped.step.end()
    assert stepped.num_saved == 2


@pytest.mark.parametrize("is_asked_first", [False, True], ids=["without speculative decoding", "with it"])
def test_what_is_computed_on_top_of_kv_that_did_not_come_is_not_kept(
    stepped: Stepped, is_asked_first: bool
) -> None:
    stepped.damage()
    stepped.begin()
    stepped.run()
    failed = stepped.step.take_failed() if is_asked_first else set()
    stepped.step.end()
    assert failed | stepped.step.take_failed() == {1, 2}
    assert stepped.num_saved == 0


def test_blocks_of_a_stage_that_have_no_place_on_the_device_are_not_missed(stepped: Stepped) -> None:
    stage = stepped.begin()
    stepped.moves.loads[0] = LoadBlocks(stage, [1], [2], is_whole=False)
    stepped.run()
    stepped.step.end()
    assert not stepped.step.take_failed()
    assert stepped.num_saved == 2
    for layer in stepped.device:
        assert bytes(layer[2].tolist()) == content(READ[1])
        assert not layer[1].any()


@pytest.mark.parametrize(
    ("spec", "gives_up"),
    [
        (FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32), False),
        (
            SlidingWindowSpec(
                block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32, sliding_window=64
            ),
            True,
        ),
        (
            ChunkedLocalAttentionSpec(
                block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32, attention_chunk_size=64
            ),
            True,
        ),
    ],
    ids=["full", "sliding", "chunked"],
)
def test_which_attention_gives_up_blocks_of_a_request_that_runs(spec: Any, gives_up: bool) -> None:
    assert _gives_blocks_up(spec) is gives_up
    several = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"0": spec, "1": spec})
    assert _gives_blocks_up(several) is gives_up


def test_what_lacks_its_last_layers_is_not_kept(stepped: Stepped) -> None:
    stepped.begin()
    stepped.run(SHAPE.num_layers - 1)
    stepped.step.end()
    assert stepped.num_saved == 0


def test_what_a_step_holds_that_never_ends_goes_with_its_engine_when_the_device_is_done(
    stepped: Stepped,
) -> None:
    stage = stepped.begin()
    stepped.run()
    stepped.tiers.detach()
    assert stage.blocks, "the device is copying"
    assert stepped.num_saved == 0 and not stage.blocks
    stepped.tiers.detach()
    assert stepped.num_saved == 0


def test_what_a_failed_device_copied_is_not_kept_and_nothing_stays_held(stepped: Stepped) -> None:
    stepped.begin()
    stepped.run()
    stepped.copier.has_failed = True
    stepped.step.end()
    assert stepped.num_saved == 0


def test_a_device_that_takes_no_more_work_holds_nothing_once_its_engine_is_closed(stepped: Stepped) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class Listener:
        """Of a promoter's; it fails, too."""

        close = fails

    stage = stepped.begin()
    stepped.run()
    stepped.copier.end_step = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        stepped.step.end()
    driver = VllmDriver.__new__(VllmDriver)
    stepped.tiers.listener = Listener()  # type: ignore[assignment]
    driver._tiers = stepped.tiers
    driver.scheduling = driver.adapters = Listener()  # type: ignore[assignment]
    driver.engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=fails))
    driver.close()
    assert not stage.blocks and stepped.tiers.copier is None and stepped.tiers.listener is None
    assert stepped.num_saved == 0
    driver.close()
