import pytest
import torch

NUM_TOKENS, SIZE, WIDTH = 3, 32, 4


@pytest.mark.parametrize("num_tokens", [1, NUM_TOKENS])
def test_a_single_token_of_a_wider_tensor_is_convolved_as_any_other(num_tokens: int) -> None:
    from engine_bridge.driver.corrections import gated_delta
    from engine_bridge.driver.vllm_api import _custom_ops

    gated_delta.install()
    first = _custom_ops.causal_conv1d_fwd_cpu
    gated_delta.install()
    assert _custom_ops.causal_conv1d_fwd_cpu is first, "it is put in place once"
    chosen = torch.Generator().manual_seed(1)
    whole = torch.randn(num_tokens, SIZE + 7, generator=chosen).to(torch.bfloat16)
    weight = torch.randn(SIZE, WIDTH, generator=chosen).to(torch.bfloat16)
    tokens = whole[:, :SIZE] if num_tokens == 1 else whole[:, :SIZE].contiguous()
    got = _custom_ops.causal_conv1d_fwd_cpu(
        x=tokens.transpose(0, 1),
        weight=weight,
        bias=None,
        conv_states=torch.zeros(1, WIDTH - 1, SIZE, dtype=torch.bfloat16).transpose(1, 2),
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
        cache_indices=torch.zeros(1, dtype=torch.int32),
        has_initial_state=torch.zeros(1, dtype=torch.bool),
        silu_activation=False,
        is_weight_packed=False,
    )
    padded = torch.cat([torch.zeros(WIDTH - 1, SIZE), tokens.float()])
    expected = sum(padded[at : at + num_tokens] * weight[:, at].float() for at in range(WIDTH))
    assert torch.allclose(got.transpose(0, 1).float(), expected, atol=0.05)
