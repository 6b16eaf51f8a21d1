import pytest
import torch

NUM_TOKENS, NUM_EXPERTS, TOP_K = 9, 8, 3


@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_experts_are_chosen_with_their_bias_and_weighed_without(scoring_func, renormalize, has_bias):
    from engine_bridge.driver.corrections import expert_routing
    from engine_bridge.driver.vllm_api import CPURouter

    expert_routing.install()
    first = CPURouter.__init__
    expert_routing.install()
    assert CPURouter.__init__ is first, "it is put in place once"
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
