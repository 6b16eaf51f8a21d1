"""What the tiers are made of: records of which nothing else comes back than was encoded, the order of reads, and host memory."""

from hypothesis import given
from hypothesis import strategies as st

from kvtiers.io import records
from kvtiers.io.host_pool import HostPool
from kvtiers.io.read_plan import BlockPlace, RecordPlace, plan_reads
from kvtiers.io.records import Record, RecordHead, RecordStream, decode_head, decode_keys
from kvtiers.keys import BlockKey, BlockShape

SHAPE = BlockShape(3, 10)
KEYS = [BlockKey(bytes([i]) * 32) for i in (1, 2)]
# Layer-major: [layer][block].
PARTS = [memoryview(bytes([10 * layer + block]) * 10) for layer in range(3) for block in range(2)]


def part(block: int, layer: int) -> memoryview:
    return PARTS[layer * len(KEYS) + block]


def record() -> bytes:
    stream = RecordStream([Record(KEYS, part, 0)], SHAPE)
    buffer = memoryview(bytearray(1000))
    data = b""
    while used := stream.fill(buffer):
        data += buffer[:used]
    assert len(data) == stream.num_bytes
    return data


@given(st.integers(0, RecordHead(2, SHAPE).keys_end - 1))
def test_a_record_cut_off_within_its_keys_is_none(length: int) -> None:
    data = record()[:length]
    head = decode_head(data)
    assert head is None or decode_keys(head, data) is None


def test_a_segment_header_gives_its_fingerprint_unless_a_byte_is_damaged() -> None:
    header = records.encode_segment_header("tiny-1234")
    assert len(header) == records.SEGMENT_HEADER_BYTES
    assert records.decode_segment_header(header) == "tiny-1234"
    assert len(header.rstrip(b"\0")) == 128
    for i in range(128):
        damaged = bytearray(header)
        damaged[i] ^= 0x80
        assert records.decode_segment_header(bytes(damaged)) is None


def test_first_layers_come_first_over_all_records_in_the_order_of_the_disk() -> None:
    old, new = RecordPlace(0, 128, 5), RecordPlace(1, 128, 5)
    places = [BlockPlace(record, position) for record in (new, old) for position in range(5)]
    ops = [op for batch in plan_reads(places, BlockShape(4, 100), 500) for op in batch]
    assert [(op.first_layer, op.record) for op in ops] == [(n, r) for n in range(4) for r in (old, new)]


def test_slots_come_in_runs_and_go_back() -> None:
    pool = HostPool(slot_bytes=8, capacity_bytes=80)
    assert pool.allocate(4) == [0, 1, 2, 3]
    assert pool.allocate(6) == [4, 5, 6, 7, 8, 9]
    assert pool.allocate(1) is None
    pool.free([5, 1, 2])
    assert sorted(pool.allocate(3) or []) == [1, 2, 5]
    pool.check_invariants()
