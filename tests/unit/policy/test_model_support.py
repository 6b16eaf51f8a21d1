import pytest

from engine_bridge.policy.limits.model_support import CONSEQUENCES, Mechanism, ModelFacts, left_out


@pytest.mark.parametrize(
    ("facts", "lacks"),
    [
        ({}, []),
        ({"takes_adapters": False}, ["adapters"]),
        ({"is_recurrent": True}, []),
        ({"is_speculative": True}, []),
        ({"splits_by_expert": False}, ["expert parallelism"]),
        ({"is_recurrent": True, "is_speculative": True}, ["KV tiers"]),
        ({"reuses_kv": False, "is_recurrent": True}, ["KV tiers"]),
        ({"takes_adapters": False, "reuses_kv": False}, ["adapters", "KV tiers"]),
    ],
)
def test_what_a_model_cannot_have_follows_from_its_facts(
    facts: dict[str, bool], lacks: list[Mechanism]
) -> None:
    found = left_out(ModelFacts(architecture="OddForCausalLM", **facts))
    assert list(found) == lacks and found.keys() <= CONSEQUENCES.keys()
    assert "OddForCausalLM" in found.get("adapters", "OddForCausalLM")
