"""Tokens that a tokenizer has and its model has not are refused by the request, not found by the step that computes it and all others."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from engine_bridge.driver.apis.vocabulary import refuse_unknown_tokens


def renderer(max_token_id: int, seen: list[Any], *, reads_pictures: bool = False) -> Any:
    """A renderer of vLLM's whose tokenizer has tokens up to this number."""
    tokenizer = SimpleNamespace(max_token_id=max_token_id)
    return SimpleNamespace(
        get_tokenizer=lambda: tokenizer,
        mm_processor=object() if reads_pictures else None,
        validate_token_ids=lambda token_ids, **options: seen.append((token_ids, options)),
    )


def test_a_token_that_the_model_has_not_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    from vllm.exceptions import VLLMValidationError

    seen: list[Any] = []
    rendered = renderer(300, seen)
    with caplog.at_level(logging.WARNING):
        refuse_unknown_tokens(rendered, 100)
    assert "up to number 300" in caplog.text
    rendered.validate_token_ids([5, 127], parameter="prompt")  # vLLM fills up its table to rows of 64
    rendered.validate_token_ids([])
    with pytest.raises(VLLMValidationError, match="Token id 128 is out of vocabulary"):
        rendered.validate_token_ids([128, 5], parameter="prompt")
    assert seen == [([5, 127], {"parameter": "prompt"}), ([], {}), ([128, 5], {"parameter": "prompt"})]


@pytest.mark.parametrize(("max_token_id", "reads_pictures"), [(127, False), (300, True)])
def test_other_models_are_left_as_they_are(max_token_id: int, reads_pictures: bool) -> None:
    rendered = renderer(max_token_id, [], reads_pictures=reads_pictures)
    before = rendered.validate_token_ids
    refuse_unknown_tokens(rendered, 100)
    assert rendered.validate_token_ids is before
