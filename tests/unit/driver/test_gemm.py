import pytest
import torch

from engine_bridge.driver.lora import gemm
from engine_bridge.driver.lora.few_rows import terms_at_a_time
from engine_bridge.driver.lora.gemm import CUTS, MIN_ROWS, OneThread, ProductParts, filled, shrink

from .equal_bits import needs_equal_bits

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
@pytest.mark.parametrize("rank", [8, 129, 192, 768])
@pytest.mark.parametrize("num_in", [256, 768, 896, 2048])
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
def test_the_cheapest_cut_that_keeps_bits_is_found(is_cut, cut, monkeypatch):
    monkeypatch.setattr(torch, "mm", in_parts(is_cut))
    assert gemm.cut_for.__wrapped__(900, 3) == cut


@pytest.mark.parametrize("cut", CUTS)
def test_each_cut_gives_the_product(cut):
    for num_rows, num_terms in ((1, 1), (4, 513), (191, 768), (500, 2048)):
        x, a = torch.randn(num_rows, num_terms), torch.randn(num_terms, 16)
        want = (x.double() @ a.double()).float()
        torch.testing.assert_close(gemm.cut_product(x, a, cut), want, rtol=1e-4, atol=1e-4)


@needs_equal_bits
@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut.terms])
def test_few_rows_are_added_up_as_the_product_is_cut(one_thread, cut, monkeypatch):
    """Or by MKL, where it adds up each part in parts of its own."""
    monkeypatch.setattr(gemm, "cut_for", lambda num_terms, num_columns: cut)
    at_a_time = terms_at_a_time.__wrapped__(1536, 16, is_shrink=True)
    assert at_a_time is None or at_a_time == cut.terms


def test_it_is_the_product_on_any_number_of_threads_and_few_rows_are_filled_up():
    x, a = operands(1024, 200)
    for num_threads in (1, 2):
        torch.testing.assert_close(shrink(x, a, num_threads), (x.double() @ a.double()).float())
    assert [filled(rows) for rows in (1, 4, 5, 8, 9, 11, 12, 13)] == [4, 4, 8, 8, 12, 12, 12, 13]
