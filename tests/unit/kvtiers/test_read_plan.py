"""The order and portions of reads."""

from kvtiers.io.read_plan import BlockPlace, RecordPlace, plan_reads
from kvtiers.keys import BlockShape

SHAPE = BlockShape(num_layers=4, layer_bytes=100)


def blocks_of(record: RecordPlace, *positions: int) -> list[BlockPlace]:
    return [BlockPlace(record, position) for position in positions]


def test_first_layers_come_first_over_all_records_in_the_order_of_the_disk() -> None:
    old, new = RecordPlace(0, 128, 5), RecordPlace(1, 128, 5)
    places = blocks_of(new, *range(5)) + blocks_of(old, *range(5))
    ops = [op for batch in plan_reads(places, SHAPE, 500) for op in batch]
    assert [(op.first_layer, op.record) for op in ops] == [(n, r) for n in range(4) for r in (old, new)]
