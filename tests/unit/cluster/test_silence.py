"""Who pauses itself must not take others for silent."""

from __future__ import annotations

from engine_bridge.cluster.silence import Silence


def test_silence_is_what_has_passed_since_the_other_was_heard() -> None:
    silence = Silence(0.5)
    for tick in range(21):
        silence.look(tick * 0.5)
    assert silence.seconds(2.0, 10.0) == 8.0
    assert silence.seconds(10.5, 10.0) == 0.0


def test_after_a_pause_of_its_own_nobody_was_silent() -> None:
    silence = Silence(0.5)
    silence.look(0.5)
    silence.look(40.0)
    assert silence.seconds(0.4, 40.0) == 0.0
    silence.look(40.5)
    assert silence.seconds(0.4, 40.5) == 0.5


def test_a_loop_that_is_a_little_late_did_not_pause() -> None:
    silence = Silence(0.5)
    for at_s in (0.0, 1.4, 2.8, 4.2, 5.6):
        silence.look(at_s)
    assert silence.seconds(0.0, 5.6) == 5.6
