from types import SimpleNamespace

import pytest
import torch

from engine_bridge.driver.corrections import cpu_steps


class Blocks:
    """One group's blocks of two requests."""

    def __init__(self, first):
        self.table = torch.arange(first, first + 6).reshape(2, 3)

    def get_device_tensor(self, num_reqs):
        return self.table[:num_reqs]


@pytest.mark.parametrize("group", [0, 1])
def test_a_draft_model_is_told_of_the_blocks_of_its_own_group(group):
    from engine_bridge.driver.vllm_api import DraftModelProposer

    blocks = [Blocks(10), Blocks(20)]
    slots = {number: torch.arange(number * 100, number * 100 + 8) for number in range(2)}

    def build(num_tokens, num_reqs, *, slot_mappings):
        """Tell of the first group, as vLLM does."""
        told = SimpleNamespace(num_reqs=num_reqs, num_actual_tokens=num_tokens)
        told.block_table_tensor, told.slot_mapping = blocks[0].table, slot_mappings[0][:num_tokens]
        return told, told

    drafter = object.__new__(DraftModelProposer)
    drafter.kv_cache_gid = group
    runner = SimpleNamespace(drafter=drafter, input_batch=SimpleNamespace(block_table=blocks))
    runner._build_attention_metadata = build
    cpu_steps.draft_in_own_group(runner)
    of_layers, of_drafts = runner._build_attention_metadata(num_tokens=5, num_reqs=1, slot_mappings=slots)
    assert of_drafts.block_table_tensor[0].tolist() == blocks[group].table[0].tolist()
    assert of_drafts.slot_mapping.tolist() == slots[group][:5].tolist()
    assert of_layers.slot_mapping.tolist() == slots[0][:5].tolist(), "what layers are told stays"


@pytest.mark.parametrize(
    "settings", [torch.tensor([0.0, 0.5, 0.01]), torch.tensor([7, 0, 3], dtype=torch.int32)]
)
def test_each_drafted_token_has_the_setting_of_its_request(settings: torch.Tensor) -> None:
    """Requests without drafted tokens have no part in it, and a value that stands for another one is replaced."""
    from engine_bridge.driver.vllm_api import rejection_sampler

    cpu_steps.follow_settings_of_drafts()
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    expanded = rejection_sampler.expand_batch_to_tokens(settings, ends, 5, replace_from=0, replace_to=1)
    first, _, last = settings.tolist()
    expected = torch.tensor([first or 1, first or 1, last, last, last], dtype=settings.dtype)
    assert torch.equal(expanded, expected)
