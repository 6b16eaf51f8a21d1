"""Recorded runs of agents as programs: which calls belong together, and what each of them asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.emulated.agent_runs import MIN_ANSWER_TOKENS, read_runs


def test_whole_prompts_continue_the_latest_call_that_they_begin_like(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "run,call,at_s,prompt_chars,shared_chars,output_chars\n"
        "0,0,0.0,400,0,400\n"
        "0,1,3.0,4000,0,40\n"
        "0,2,4.0,800,400,400\n"
        "1,0,0.0,400,0,0\n"
        "0,3,9.0,4400,4000,400\n"
    )
    first, second = read_runs(path)
    assert [call.context for call in first] == ["0", "1", "1", "1"], "4,000 characters are enough for 400"
    assert [call.num_prompt_tokens for call in first] == [100, 1000, 200, 1100]
    assert [call.pause_s for call in first] == pytest.approx([1.0, 1.0 - 16 / 50, 3.0, 0.0])
    assert second[0].num_answer_tokens == MIN_ANSWER_TOKENS


def test_messages_add_up_to_the_context_of_their_agent(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "run,call,at_s,agent,prompt_chars,output_chars\n"
        "0,0,0.0,user,40,400\n0,1,5.0,bot,400,400\n0,2,9.0,user,400,400\n"
    )
    (calls,) = read_runs(path)
    assert [(call.context, call.num_prompt_tokens) for call in calls] == [
        ("user", 10),
        ("bot", 100),
        ("user", 210),
    ]


@pytest.mark.parametrize("text", ["run,call\n0,0\n", "run,at_s,prompt_chars,output_chars\n0,x,1,1\n"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(text)
    with pytest.raises(ValueError):
        read_runs(path)
