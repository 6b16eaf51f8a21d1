"""What a request takes of the whole engine adds up, and expected answers follow what predictions of their length came to."""

import pytest

from engine_bridge.policy.scheduling.engine_work import MAX_RUNNING, AnswerMeans, EngineWork
from engine_bridge.protocol.engine_request import LengthGuess


def test_work_is_the_prompts_time_and_a_share_of_the_steps_of_a_full_device() -> None:
    work = EngineWork(1000, lambda num_tokens: num_tokens / 100, lambda num, num_tokens: 0.5)
    assert work.seconds(50, 20, 100) == pytest.approx(0.2 + 100 * 0.5 / 10), (
        "ten of 100 tokens fit on average"
    )
    assert work.seconds(5000, 0, 10) == pytest.approx(10 * 0.5), "the largest runs alone"
    assert work.seconds(1, 0, 1) == pytest.approx(0.5 / MAX_RUNNING), "no more run than there are slots"


def test_an_answers_mean_is_learned_by_its_predicted_length() -> None:
    means = AnswerMeans()
    short, long = LengthGuess(40, 60, "test"), LengthGuess(800, 1000, "test")
    assert means.mean(short) == 40
    for _ in range(50):
        means.saw(short, 80)
        means.saw(long, 400)
    assert 70 < means.mean(short) < 80 and 400 < means.mean(long) < 460
