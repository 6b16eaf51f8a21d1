"""Which adapters a step lays out itself."""

from engine_bridge.core.adapters.step_layouts import MOST_SHARE, StepFacts, StepLayouts

MB = 10**6


def layouts(num_running: int, step_s: float, bytes_per_s: float = 1e9) -> StepLayouts:
    found = StepLayouts(lambda: StepFacts(num_running, step_s))
    found.rate.note(bytes_per_s, 1.0, 0.0)
    found.begin()
    return found


def test_several_share_what_a_step_may_lay_out_by_how_long_layouts_were_seen_to_take() -> None:
    found = layouts(2, 0.1)
    assert found.allows(1, 15 * MB, 0.0) and found.allows(2, 10 * MB, 0.0)
    assert not found.allows(3, MB, 0.0), f"{MOST_SHARE:.0%} of the step are given"
    assert found.allows(1, 15 * MB, 0.0), "an answer stands until the next step"
    found.begin()
    assert found.allows(3, MB, 0.0)
    found.begin()
    assert found.allows(1, 20 * MB, 0.0)
    for _ in range(20):
        found.rate.note(0.1e9, 1.0, 0.0)
    found.begin()
    assert not found.allows(1, 20 * MB, 0.0)
