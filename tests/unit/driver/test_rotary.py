import pytest
import torch

NUM_TOKENS, NUM_HEADS, SIZE = 7, 4, 64


@pytest.fixture(scope="module", params=[False, True], ids=["pairs", "halves"])
def rope(request):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    from engine_bridge.driver.corrections import rotary
    from engine_bridge.driver.vllm_api import _custom_ops

    rotary.install()
    first = _custom_ops.rotary_embedding
    rotary.install()
    assert _custom_ops.rotary_embedding is first, "it is put in place once"
    with set_current_vllm_config(VllmConfig()):
        how = {"is_neox_style": request.param, "dtype": torch.float32, "max_position": 128}
        yield get_rope(SIZE, **how, rope_parameters={"rope_theta": 10_000.0, "rope_type": "default"})


FORMS = {
    "beside": lambda num_heads: torch.randn(NUM_TOKENS, num_heads * SIZE),
    "apart": lambda num_heads: torch.randn(NUM_TOKENS, num_heads, SIZE),
    "part of wider": lambda num_heads: torch.randn(NUM_TOKENS, num_heads, 3 * SIZE)[..., -SIZE:],
    # As MLA's key: one head, at the end of a wider row.
    "part of row": lambda num_heads: torch.randn(NUM_TOKENS, 640)[:, -SIZE:].unsqueeze(1),
}
WIDE = ("apart", "part of wider")


@pytest.mark.parametrize(
    ("query_of", "key_of"),
    # vLLM asks for as many dimensions of keys as of queries.
    [("beside", "beside"), ("beside", ""), *((q, k) for q in WIDE for k in (*WIDE, "part of row", ""))],
)
@pytest.mark.parametrize("num_tokens", [1, NUM_TOKENS])
def test_the_kernel_turns_what_the_formula_turns(rope, query_of, key_of, num_tokens):
    torch.manual_seed(3)
    query = FORMS[query_of](NUM_HEADS)[:num_tokens]
    key = FORMS[key_of](1)[:num_tokens] if key_of else None
    positions = torch.arange(5, 5 + num_tokens)
    expected = rope.forward_native(positions, query.clone(), key.clone() if key_of else None)
    found = rope.forward_cpu(positions, query, key)
    torch.testing.assert_close(found[0], expected[0].view_as(found[0]))
    torch.testing.assert_close(query, found[0])  # it changes what it is given
    if key_of:
        torch.testing.assert_close(found[1], expected[1].view_as(found[1]))
