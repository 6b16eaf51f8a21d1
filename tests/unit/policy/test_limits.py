"""What a request's settings may hold, and what its grammar may take: memory, and time at each token."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine_bridge.policy.limits.grammar_room import GrammarRoom
from engine_bridge.policy.limits.matcher_budget import PER_TOKEN_S, SAVED_S, MatcherBudget
from engine_bridge.policy.limits.request_limits import RequestLimits, check_sampling
from engine_bridge.protocol.errors import InvalidRequest

LIMITS = RequestLimits(
    max_stop_strings=2,
    max_bad_words=2,
    max_logit_bias=3,
    max_grammar_kib=1,
    max_grammar_rules=4,
    max_schema_values=10,
    max_choices=3,
    max_regex_chars=50,
    max_regex_repeat=20,
)


def params(**changes: Any) -> SimpleNamespace:
    """The fields of vLLM's SamplingParams."""
    plain: dict[str, Any] = {"n": 1, "stop": [], "bad_words": [], "logit_bias": None, "stop_token_ids": []}
    plain |= {"structured_outputs": None, "repetition_detection": None}
    return SimpleNamespace(**(plain | changes))


def grammar(**form: Any) -> SimpleNamespace:
    """Settings with a grammar in one of the forms of vLLM's StructuredOutputsParams."""
    forms = dict.fromkeys(("json", "regex", "choice", "grammar", "structural_tag"))
    return params(structured_outputs=SimpleNamespace(**(forms | form)))


@pytest.mark.parametrize(
    "given",
    [
        params(),
        params(stop="one", bad_words=["a", "b"], logit_bias={1: 1.0, 2: 1.0, 3: 1.0}),
        grammar(json={"type": "object"}),
        grammar(json='{"type":"object"}'),
        grammar(json="no json: the engine says so"),
        grammar(choice=["a", "b", "c"]),
        grammar(regex="[a-z]{1,20}"),
        grammar(grammar='start: a b\na: "x" | "y"\nb: "z"'),
    ],
)
def test_settings_within_their_limits_pass(given: SimpleNamespace) -> None:
    check_sampling(given, LIMITS)


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        (params(n=300), "max_sequences"),
        (params(repetition_detection=SimpleNamespace(max_pattern_size=10**6)), "max_pattern_size"),
        (grammar(structural_tag='{"triggers":[' + '"x",' * 70 + '"x"]}'), "triggers"),
        (params(stop=["a", "b", "c"]), "max_stop_strings"),
        (params(stop=["a" * 2000]), "characters"),
        (params(bad_words=["a", "b", "c"]), "max_bad_words"),
        (params(bad_words=["a" * 2000]), "characters"),
        (params(logit_bias=dict.fromkeys(range(4), 1.0)), "max_logit_bias"),
        (params(stop_token_ids=[1, 2, 3, 4]), "max_logit_bias"),
        (grammar(json={"enum": list(range(20))}), "max_schema_values"),
        (grammar(json={"title": "x" * 2000}), "max_grammar_kib"),
        (grammar(json='"' + "x" * 2000 + '"'), "max_grammar_kib"),
        (grammar(json='{"enum":[1,2,3,4,5,6,7,8,9,0]}'), "max_schema_values"),
        (grammar(structural_tag="x" * 2000), "max_grammar_kib"),
        (grammar(choice=["a"] * 4), "max_choices"),
        (grammar(choice=["a" * 2000]), "max_grammar_kib"),
        (grammar(regex="a" * 51), "max_regex_chars"),
        (grammar(regex="(a+)+{1,21}"), "max_regex_repeat"),
        (grammar(regex="a{99999999999999999999}"), "max_regex_repeat"),
        (grammar(grammar="x" * 2000), "max_grammar_kib"),
        (grammar(grammar='start: "a" | "b" | "c" | "d" | "e"'), "max_grammar_rules"),
        (grammar(grammar="\n".join(f"r{i} ::= 'a'" for i in range(5))), "max_grammar"),
    ],
)
def test_settings_over_a_limit_are_refused_with_its_name(given: SimpleNamespace, setting: str) -> None:
    with pytest.raises(InvalidRequest, match=setting):
        check_sampling(given, LIMITS)


def test_a_grammar_of_nothing_but_line_ends_is_measured_like_any_other() -> None:
    """A pattern that looked at a run of them again and again took twenty minutes for this one."""
    check_sampling(grammar(grammar="\n" * 200_000), RequestLimits())


def test_room_for_grammars_that_is_given_back_can_be_taken_again() -> None:
    room = GrammarRoom(1000)
    assert room.take("one", 400) and not room.take("one", 400)
    room.give_back("one", 400)
    assert room.num_held_bytes == 0
    assert room.take("one", 400)


def test_a_matchers_share_may_be_taken_for_ever_and_one_token_over_all_that_was_saved_ends_it_for_good() -> (
    None
):
    budget = MatcherBudget()
    for _ in range(10_000):
        budget.next_token()
        budget.spend(PER_TOKEN_S)
        assert not budget.is_spent
    budget = MatcherBudget()
    budget.spend(1.2 * SAVED_S)
    for _ in range(1000):
        budget.next_token()
    assert budget.is_spent
