import pytest
import torch

from engine_bridge.driver.corrections import cpu_layers
from engine_bridge.driver.engine import worker_parts

NUM_TOKENS, NUM_HEADS, SIZE = 7, 4, 64
NUM_EXPERTS, TOP_K = 8, 3
WIDTH = 4


@pytest.fixture(scope="module", params=[False, True], ids=["pairs", "halves"])
def rope(request):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    cpu_layers.flatten_heads()
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


@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_experts_are_chosen_with_their_bias_and_weighed_without(scoring_func, renormalize, has_bias):
    from engine_bridge.driver.vllm_api import CPURouter

    cpu_layers.group_experts()
    torch.manual_seed(3)
    logits, bias = torch.randn(NUM_TOKENS, NUM_EXPERTS), torch.randn(NUM_EXPERTS)
    router = CPURouter(
        top_k=TOP_K,
        global_num_experts=NUM_EXPERTS,
        renormalize=renormalize,
        scoring_func=scoring_func,
        e_score_correction_bias=bias if has_bias else None,
    )
    weights, ids = router._compute_routing(torch.empty(NUM_TOKENS, 4), logits, None)
    scores = logits.softmax(1) if scoring_func == "softmax" else logits.sigmoid()
    chosen = (scores + bias * has_bias).topk(TOP_K).indices
    expected = scores.gather(1, chosen)
    if renormalize:
        expected = expected / expected.sum(1, keepdim=True)
    found = torch.zeros(NUM_TOKENS, NUM_EXPERTS).scatter(1, ids.long(), weights)
    torch.testing.assert_close(found, torch.zeros_like(found).scatter(1, chosen, expected))
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32 and weights.is_contiguous()


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_single_token_of_a_wider_tensor_is_convolved_as_any_other(num_tokens: int) -> None:
    from engine_bridge.driver.vllm_api import _custom_ops

    cpu_layers.take_single_tokens()
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


def test_each_part_of_vllm_s_is_replaced_once():
    from engine_bridge.driver.vllm_api import CPURouter, MambaMixer2, _custom_ops

    def install():
        for replace in ("flatten_heads", "end_steps_at_states", "take_single_tokens", "group_experts"):
            getattr(cpu_layers, replace)()
        ours = CPURouter.__init__, MambaMixer2.get_kv_cache_spec
        return *ours, _custom_ops.rotary_embedding, _custom_ops.causal_conv1d_fwd_cpu

    assert install() == install()


@pytest.mark.parametrize("on_cpu", [True, False])
def test_all_corrections_are_put_in_place_but_those_that_are_off_or_for_another_device(monkeypatch, on_cpu):
    everywhere, for_cpus = worker_parts._EVERYWHERE, worker_parts._ON_CPU
    found, expected = set(), {*everywhere, *(for_cpus if on_cpu else ())}
    for table in (everywhere, for_cpus):
        for feature in table:
            monkeypatch.setitem(table, feature, lambda feature=feature: found.add(feature))
    worker_parts.install(frozenset(), on_cpu=on_cpu, has_adapters=False)
    assert found == expected
    for feature in expected:
        found.clear()
        worker_parts.install(frozenset({feature}), on_cpu=on_cpu, has_adapters=False)
        assert found == expected - {feature}
