import copy
import random
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.sample.ops.bad_words import apply_bad_words as of_vllm

from engine_bridge.driver.corrections.bad_words import Forms, apply_bad_words, put_aside


@pytest.mark.parametrize("seed", range(5))
def test_the_same_tokens_are_banned_as_by_vllm(seed: int) -> None:
    chance = random.Random(seed)

    def tokens(num: int) -> list[int]:
        return [chance.randrange(4) for _ in range(num)]

    words = {row: [tokens(chance.randint(1, 4)) for _ in range(12)] for row in (0, 2)}
    answers = [tokens(length) for length in (0, 3, chance.randrange(7))]
    ours, theirs = torch.zeros(3, 6), torch.zeros(3, 6)
    apply_bad_words(ours, {row: copy.copy(Forms(forms)) for row, forms in words.items()}, answers)
    of_vllm(theirs, words, answers)
    assert torch.equal(ours, theirs) and torch.isinf(ours).any()


def test_words_are_copied_put_aside_and_come_back() -> None:
    forms = Forms([[1], [2, 3]])  # vLLM copies a request's settings, one for each of its answers
    for other in (copy.copy(forms), copy.deepcopy(forms)):
        assert other == [[1], [2, 3]] and other.banned([2]) == [1, 3]
    params = SimpleNamespace(bad_words=["a"])
    with pytest.raises(ValueError, match="late"), put_aside(params) as words:
        assert (params.bad_words, words) == ([], ["a"])
        raise ValueError("too late")
    assert params.bad_words == ["a"]
