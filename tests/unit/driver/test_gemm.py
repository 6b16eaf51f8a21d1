"""On one thread a row comes out the same whatever rows are computed beside it; on several it is the same product."""

import pytest

torch = pytest.importorskip("torch")

from engine_bridge.driver.gemm import MANY_ROWS, MIN_ROWS, SHORT_COLUMNS, filled, shrink  # noqa: E402

from .equal_bits import needs_equal_bits  # noqa: E402

MOST_ROWS = 1024


def operands(num_in, rank):
    generator = torch.Generator().manual_seed(num_in + rank)
    x = torch.randn(MOST_ROWS, num_in, generator=generator)
    return x, torch.randn(num_in, rank, generator=generator) * 0.05


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@needs_equal_bits
@pytest.mark.parametrize("rank", [8, SHORT_COLUMNS, SHORT_COLUMNS + 1, 192, 384, 768])
@pytest.mark.parametrize("num_in", [256, 768, 896, 1024, 2048])
def test_a_rows_bits_do_not_depend_on_its_companions(one_thread, num_in, rank):
    x, a = operands(num_in, rank)
    alone = torch.cat([shrink(x[i : i + MIN_ROWS], a, 1) for i in range(0, MOST_ROWS, MIN_ROWS)])
    for rows in (12, 33, 100, MANY_ROWS - 1, MANY_ROWS, MANY_ROWS + 1, 257, 383, 384, 511, 577, MOST_ROWS):
        assert torch.equal(shrink(x[:rows], a, 1), alone[:rows]), f"{rows} rows"


@pytest.mark.parametrize("num_threads", [1, 2])
def test_it_is_the_product(num_threads):
    x, a = operands(1024, 200)
    torch.testing.assert_close(shrink(x, a, num_threads), (x.double() @ a.double()).float())


@pytest.mark.parametrize(
    ("rows", "num"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 12), (11, 12), (12, 12), (13, 13)]
)
def test_few_rows_are_filled_up(rows, num):
    assert filled(rows) == num
