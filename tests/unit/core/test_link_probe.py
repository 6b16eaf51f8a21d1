"""When the link is measured, by how much at a time, and what is believed of it."""

import pytest

from engine_bridge.core.kv.link_probe import IDLE_S, NUM_SAMPLES, SLICE_S, LinkProbe

MIB = 1 << 20


def test_nothing_is_copied_before_the_engine_has_been_idle_for_a_while() -> None:
    probe = LinkProbe(MIB, 100, now=10.0)
    assert probe.wait_s(10.0) == IDLE_S
    probe.looked(is_busy=True, now=11.0)
    assert probe.wait_s(99.0) is None
    probe.looked(is_busy=False, now=100.0)
    probe.looked(is_busy=False, now=100.0 + IDLE_S / 2)
    assert probe.wait_s(100.0 + IDLE_S / 2) == pytest.approx(IDLE_S / 2)
    assert probe.wait_s(100.0 + IDLE_S) == 0
    probe.put_off(102.0)
    assert probe.wait_s(102.0) == IDLE_S


@pytest.mark.parametrize("bytes_per_s", [0.2e9, 4e9, 25e9])
def test_the_speed_is_found_in_few_copies_none_longer_than_the_slice(bytes_per_s: float) -> None:
    probe, num_copies = LinkProbe(MIB // 4, 100, now=0.0), 0
    while probe.link is None:
        copy_s = 2 * probe.num_blocks * (MIB // 4) / bytes_per_s
        assert copy_s <= SLICE_S + 1e-9
        probe.copied(copy_s)
        num_copies += 1
        assert num_copies <= NUM_SAMPLES + 10
    assert probe.link.h2d_bytes_per_s == pytest.approx(bytes_per_s)
    assert probe.wait_s(99.0) is None
