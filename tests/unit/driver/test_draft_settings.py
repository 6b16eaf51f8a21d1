import pytest
import torch


@pytest.mark.parametrize(
    "settings", [torch.tensor([0.0, 0.5, 0.01]), torch.tensor([7, 0, 3], dtype=torch.int32)]
)
def test_each_drafted_token_has_the_setting_of_its_request(settings: torch.Tensor) -> None:
    """Requests without drafted tokens have no part in it, and a value that stands for another one is replaced."""
    from engine_bridge.driver.corrections import draft_settings
    from engine_bridge.driver.vllm_api import rejection_sampler

    draft_settings.install()
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    expanded = rejection_sampler.expand_batch_to_tokens(settings, ends, 5, replace_from=0, replace_to=1)
    first, _, last = settings.tolist()
    expected = torch.tensor([first or 1, first or 1, last, last, last], dtype=settings.dtype)
    assert torch.equal(expanded, expected)
