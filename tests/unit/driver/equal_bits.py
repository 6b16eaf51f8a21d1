"""With AVX-512 a row's bits do not depend on the rows beside it (engine_bridge/driver/lora/lora.py); elsewhere results are equal up to rounding."""

import pytest
import torch

HAS_EQUAL_BITS = torch.backends.cpu.get_cpu_capability() == "AVX512"

needs_equal_bits = pytest.mark.skipif(
    not HAS_EQUAL_BITS, reason="MKL computes rows by other kernels without AVX-512"
)


def assert_same(found: torch.Tensor, want: torch.Tensor, what: str = "") -> None:
    if HAS_EQUAL_BITS:
        assert torch.equal(found, want), what
    else:
        torch.testing.assert_close(found, want)
