import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.driver.profiling import disk
from engine_bridge.driver.profiling.adapters import fit_line
from engine_bridge.driver.profiling.budget import Budget
from engine_bridge.driver.profiling.copies import Times, _sizes, _swap_error, fit_link
from engine_bridge.driver.profiling.steps import Bounds, grid
from kvtiers.keys import BlockShape

# Of requests, tokens in a batch and in KV, tokens that the model reads, and of prompts in a step.
BOUNDS_OF_ANY = st.integers(1, 300), st.integers(300, 10_000), st.integers(64, 2_000_000)
MORE_BOUNDS = st.integers(64, 100_000), st.integers(16, 100_000)


@given(st.builds(Bounds, *BOUNDS_OF_ANY, *MORE_BOUNDS))
def test_every_point_can_be_run(bounds: Bounds) -> None:
    points = grid(bounds)
    assert points
    for num_prefill, num_decodes, num_context in points:
        num_requests = num_decodes + (num_prefill > 0)
        assert 0 < num_requests <= bounds.num_seqs
        assert num_prefill + num_decodes <= bounds.num_batched_tokens
        assert num_context + num_prefill + num_decodes <= bounds.num_kv_tokens
        assert num_context // num_requests + max(num_prefill, 1) <= bounds.max_model_len
        assert num_prefill <= bounds.max_prefill_tokens


def copies(setup_s: float, out_rate: float, in_rate: float, noise: float = 0.0) -> Times:
    chance = random.Random(3)

    def times(num_bytes: int, rate: float) -> list[float]:
        return [abs(setup_s + num_bytes / rate) * chance.lognormvariate(0, noise) for _ in range(9)]

    ways = ((True, out_rate), (False, in_rate))
    return {(size, is_out): times(4096 * size, rate) for size in _sizes(200) for is_out, rate in ways}


def test_a_link_is_found_again_each_way_with_its_set_up() -> None:
    times = copies(50e-6, 8e9, 5e9)
    link = fit_link(times, 4096)
    found = link.d2h_bytes_per_s, link.h2d_bytes_per_s, link.setup_s
    assert found == pytest.approx((8e9, 5e9, 50e-6), rel=1e-6)
    assert _swap_error(link, times, {3, 64}, 4096) < 1e-6
    for setup_s in (2e-9, 0.0, -1e-6):  # noise does not make a set-up of less than nothing
        link = fit_link(copies(setup_s, 8e9, 5e9, noise=0.2 if setup_s >= 0 else 0.0), 4096)
        assert link.setup_s >= 0 and link.d2h_bytes_per_s > link.h2d_bytes_per_s > 0
    assert _sizes(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20] and _sizes(1) == [1]


def test_a_line_says_how_much_it_explains() -> None:
    line = fit_line([8, 16, 64, 128], [2e-6 * x + 3e-4 for x in (8, 16, 64, 128)])
    assert (line.a, line.b, line.r2) == pytest.approx((2e-6, 3e-4, 1.0))
    assert fit_line([1, 2, 3, 4], [1.0, -1.0, 1.0, -1.0]).r2 < 0.3
    assert fit_line([8, 8], [1.0, 3.0]).a == 0


def test_a_disk_that_does_not_give_back_what_was_written_is_not_measured(tmp_path: Path) -> None:
    """tests/integration/test_profile.py measures one that does."""

    def spoil(what: str, share_done: float, left_s: float) -> None:
        if what == "disk: reading":
            for path in (tmp_path / "log").glob("*"):
                if path.stat().st_size > 1 << 20:
                    path.write_bytes(bytes(path.stat().st_size))

    with pytest.raises(disk.DiskUnmeasured, match="did not give back"):
        disk.measure_disk(tmp_path, BlockShape(4, 1 << 16), Budget(0, 0, 0, spoil, lambda: 1.0))
