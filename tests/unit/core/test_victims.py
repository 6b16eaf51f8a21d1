"""Who loses its memory first: the last in the list."""

from engine_bridge.core.scheduling.victims import most_new_blocks


def test_a_step_needs_blocks_for_full_ones_and_for_what_its_prompts_fill() -> None:
    def needed(num_tokens: int, num_computed: int, step_tokens: int = 64) -> int:
        return most_new_blocks([("a", num_tokens, num_computed)], step_tokens, 16)

    assert needed(17, 16) == 1, "its last block is full"
    assert needed(16, 15) == needed(18, 17) == 0, "its next token has room"
    assert needed(16, 16) == 1, "of a step under way its token is not known yet"
    assert needed(40, 0) == 3
    assert needed(40, 10) == 2, "it holds the first of the three"
    assert needed(1000, 0) == 4, "a step computes no more"
    assert most_new_blocks([("a", 17, 16), ("b", 18, 17), ("c", 33, 32)], 64, 16) == 2
