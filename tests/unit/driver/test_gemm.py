"""On one thread a row comes out the same whatever rows are computed beside it; on several it is the same product."""

import pytest

torch = pytest.importorskip("torch")

from engine_bridge.driver.lora import gemm  # noqa: E402
from engine_bridge.driver.lora.few_rows import terms_at_a_time  # noqa: E402
from engine_bridge.driver.lora.gemm import (  # noqa: E402
    CUTS,
    MIN_ROWS,
    OneThread,
    ProductParts,
    cut_for,
    cut_product,
    filled,
    shrink,
)

from .equal_bits import needs_equal_bits  # noqa: E402

MOST_ROWS = 1024


def operands(num_in, rank):
    generator = torch.Generator().manual_seed(num_in + rank)
    x = torch.randn(MOST_ROWS, num_in, generator=generator)
    return x, torch.randn(num_in, rank, generator=generator) * 0.05


@pytest.fixture
def one_thread():
    with OneThread():
        yield


@needs_equal_bits
@pytest.mark.parametrize("rank", [8, 128, 129, 192, 384, 768])
@pytest.mark.parametrize("num_in", [256, 768, 896, 1024, 2048])
def test_a_rows_bits_do_not_depend_on_its_companions(one_thread, num_in, rank):
    x, a = operands(num_in, rank)
    alone = torch.cat([shrink(x[i : i + MIN_ROWS], a, 1) for i in range(0, MOST_ROWS, MIN_ROWS)])
    for rows in (12, 33, 100, 191, 192, 193, 257, 383, 384, 511, 577, MOST_ROWS):
        assert torch.equal(shrink(x[:rows], a, 1), alone[:rows]), f"{rows} rows"


def in_parts(is_cut):
    """A library that adds up a row's products in two parts where `is_cut(num_rows, num_terms)`."""

    def multiply(x, a):
        terms = x.double()[:, :, None] * a.double()
        half = x.size(1) // 2 if is_cut(*x.shape) else 0
        return terms[:, :half].sum(1).float() + terms[:, half:].sum(1).float()

    return multiply


@pytest.mark.parametrize(
    ("is_cut", "cut"),
    [
        (lambda num_rows, num_terms: False, ProductParts()),
        (lambda num_rows, num_terms: num_rows >= 192, ProductParts(rows=96)),
        (lambda num_rows, num_terms: num_rows >= 33 and num_terms > 800, ProductParts(terms=512)),
        (lambda num_rows, num_terms: num_rows >= 33 and num_terms > 400, ProductParts(terms=256)),
        (lambda num_rows, num_terms: num_rows >= 33, ProductParts()),
    ],
)
def test_the_cheapest_cut_that_keeps_bits_is_found(is_cut, cut):
    assert cut_for(900, 3, in_parts(is_cut)) == cut


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("num_rows", "num_terms"), [(1, 1), (4, 513), (191, 768), (500, 2048)])
def test_each_cut_gives_the_product(cut, num_rows, num_terms):
    x, a = torch.randn(num_rows, num_terms), torch.randn(num_terms, 16)
    torch.testing.assert_close(
        cut_product(x, a, cut), (x.double() @ a.double()).float(), rtol=1e-4, atol=1e-4
    )


@needs_equal_bits
@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut.terms])
def test_few_rows_are_added_up_as_the_product_is_cut(one_thread, cut, monkeypatch):
    """Or by MKL, where it adds up each part in parts of its own."""
    monkeypatch.setattr(gemm, "cut_for", lambda num_terms, num_columns: cut)
    at_a_time = terms_at_a_time.__wrapped__(1536, 16, is_shrink=True)
    assert at_a_time is None or at_a_time == cut.terms


@pytest.mark.parametrize("num_threads", [1, 2])
def test_it_is_the_product(num_threads):
    x, a = operands(1024, 200)
    torch.testing.assert_close(shrink(x, a, num_threads), (x.double() @ a.double()).float())


@pytest.mark.parametrize(
    ("rows", "num"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 12), (11, 12), (12, 12), (13, 13)]
)
def test_few_rows_are_filled_up(rows, num):
    assert filled(rows) == num
