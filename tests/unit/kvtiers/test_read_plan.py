"""The order and portions of reads."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvtiers.io.read_plan import IOV_MAX, BlockPlace, ReadOp, RecordPlace, plan_reads
from kvtiers.keys import BlockShape

SHAPE = BlockShape(num_layers=4, layer_bytes=100)


def blocks_of(record: RecordPlace, *positions: int) -> list[BlockPlace]:
    return [BlockPlace(record, position) for position in positions]


def test_a_small_record_is_read_whole_at_once() -> None:
    record = RecordPlace(0, 128, 2)
    assert plan_reads(blocks_of(record, 0, 1), SHAPE, 1000) == [[ReadOp(record, 0, (0, 1), 0, 4)]]


def test_a_large_record_is_read_in_bands_of_layers() -> None:
    record = RecordPlace(0, 128, 5)
    (first,), (second,) = plan_reads(blocks_of(record, 0, 1, 2, 3, 4), SHAPE, 1000)
    assert (first.first_layer, first.num_layers) == (0, 2)
    assert (second.first_layer, second.num_layers) == (2, 2)
    assert first.is_whole_width


def test_a_layer_too_large_for_one_read_is_cut_into_equal_portions() -> None:
    record = RecordPlace(0, 128, 12)
    batches = plan_reads(blocks_of(record, *range(12)), BlockShape(1, 100), 1000)
    assert [[op.blocks for op in batch] for batch in batches] == [[tuple(range(6))], [tuple(range(6, 12))]]


def test_first_layers_come_first_over_all_records_in_the_order_of_the_disk() -> None:
    old, new = RecordPlace(0, 128, 5), RecordPlace(1, 128, 5)
    places = blocks_of(new, *range(5)) + blocks_of(old, *range(5))
    ops = [op for batch in plan_reads(places, SHAPE, 500) for op in batch]
    assert [(op.first_layer, op.record) for op in ops] == [(n, r) for n in range(4) for r in (old, new)]


def test_a_gap_parts_a_run_and_missing_blocks_are_left_out() -> None:
    record = RecordPlace(0, 128, 9)
    places = [BlockPlace(record, 4), None, BlockPlace(record, 7), BlockPlace(record, 5)]
    (batch,) = plan_reads(places, SHAPE, 10_000)
    assert [(op.first_position, op.blocks) for op in batch] == [(4, (0, 3)), (7, (2,))]
    assert plan_reads([None, None], SHAPE, 1000) == []


def test_small_records_share_a_batch_up_to_the_size_of_a_read() -> None:
    places = [BlockPlace(RecordPlace(0, 128 + 500 * i, 1), 0) for i in range(5)]
    assert [len(batch) for batch in plan_reads(places, SHAPE, 1000)] == [2, 2, 1]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[BlockPlace | None], BlockShape, int]:
    records = [RecordPlace(n % 2, 1000 * n, draw(st.integers(1, 6))) for n in range(draw(st.integers(1, 4)))]
    place = st.sampled_from(records).flatmap(
        lambda record: st.builds(BlockPlace, st.just(record), st.integers(0, record.num_blocks - 1))
    )
    places = draw(st.lists(st.none() | place, max_size=12))
    return places, BlockShape(draw(st.integers(1, 5)), draw(st.integers(1, 50))), draw(st.integers(1, 400))


@given(cases())
def test_every_part_is_read_exactly_once(case: tuple[list[BlockPlace | None], BlockShape, int]) -> None:
    places, shape, max_read_bytes = case
    batches = plan_reads(places, shape, max_read_bytes)
    seen: Counter[tuple[int, int]] = Counter()
    for op in (op for batch in batches for op in batch):
        assert op.num_bytes(shape) <= max(max_read_bytes, shape.layer_bytes)
        assert len(op.blocks) <= IOV_MAX
        for i, block in enumerate(op.blocks):
            assert places[block] == BlockPlace(op.record, op.first_position + i)
            seen.update((block, layer) for layer in op.layers)
    assert seen == Counter(
        (block, layer)
        for block, place in enumerate(places)
        if place is not None
        for layer in range(shape.num_layers)
    )
    firsts = [op.first_layer for batch in batches for op in batch]
    assert firsts == sorted(firsts)
    assert all(
        sum(op.num_bytes(shape) for op in batch) <= max_read_bytes or len(batch) == 1 for batch in batches
    )
