"""When the link is measured, by how much at a time, and what is believed of it."""

import pytest

from engine_bridge.core.kv.link_probe import IDLE_S, NUM_SAMPLES, SLICE_S, LinkProbe

MIB = 1 << 20


def run(
    probe: LinkProbe, bytes_per_s: float, setup_s: float = 0.0, block_bytes: int = MIB // 4
) -> list[float]:
    """Copies until it knows; returns how long each took."""
    times = []
    while probe.link is None:
        times.append(setup_s + 2 * probe.num_blocks * block_bytes / bytes_per_s)
        probe.copied(times[-1])
        assert len(times) < 50
    return times


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
    probe = LinkProbe(MIB // 4, 100, now=0.0)
    times = run(probe, bytes_per_s)
    assert probe.link.h2d_bytes_per_s == pytest.approx(bytes_per_s)
    assert len(times) <= NUM_SAMPLES + 10
    assert max(times) <= SLICE_S + 1e-9
    assert probe.wait_s(99.0) is None
