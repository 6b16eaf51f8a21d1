"""What a request's settings may hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from engine_bridge.policy.limits.request_limits import RequestLimits, check_sampling, measure
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


@dataclass
class Structured:
    """The fields of vLLM's StructuredOutputsParams."""

    json: Any = None
    regex: Any = None
    choice: Any = None
    grammar: Any = None
    structural_tag: Any = None


@dataclass
class Params:
    """The fields of vLLM's SamplingParams."""

    n: int = 1
    stop: Any = field(default_factory=list)
    bad_words: Any = field(default_factory=list)
    logit_bias: Any = None
    stop_token_ids: Any = field(default_factory=list)
    structured_outputs: Structured | None = None
    repetition_detection: Any = None


@dataclass
class Repetition:
    """The field of vLLM's RepetitionDetectionParams that costs."""

    max_pattern_size: int


@pytest.mark.parametrize(
    "params",
    [
        Params(),
        Params(stop="one", bad_words=["a", "b"], logit_bias={1: 1.0, 2: 1.0, 3: 1.0}),
        Params(structured_outputs=Structured(json={"type": "object"})),
        Params(structured_outputs=Structured(json='{"type":"object"}')),
        Params(structured_outputs=Structured(json="no json: the engine says so")),
        Params(structured_outputs=Structured(choice=["a", "b", "c"])),
        Params(structured_outputs=Structured(regex="[a-z]{1,20}")),
        Params(structured_outputs=Structured(grammar='start: a b\na: "x" | "y"\nb: "z"')),
    ],
)
def test_settings_within_their_limits_pass(params: Params) -> None:
    check_sampling(params, LIMITS)


@pytest.mark.parametrize(
    ("params", "setting"),
    [
        (Params(n=300), "max_sequences"),
        (Params(repetition_detection=Repetition(10**6)), "max_pattern_size"),
        (
            Params(structured_outputs=Structured(structural_tag='{"triggers":[' + '"x",' * 70 + '"x"]}')),
            "triggers",
        ),
        (Params(stop=["a", "b", "c"]), "max_stop_strings"),
        (Params(stop=["a" * 2000]), "characters"),
        (Params(bad_words=["a", "b", "c"]), "max_bad_words"),
        (Params(bad_words=["a" * 2000]), "characters"),
        (Params(logit_bias=dict.fromkeys(range(4), 1.0)), "max_logit_bias"),
        (Params(stop_token_ids=[1, 2, 3, 4]), "max_logit_bias"),
        (Params(structured_outputs=Structured(json={"enum": list(range(20))})), "max_schema_values"),
        (Params(structured_outputs=Structured(json={"title": "x" * 2000})), "max_grammar_kib"),
        (Params(structured_outputs=Structured(json='"' + "x" * 2000 + '"')), "max_grammar_kib"),
        (Params(structured_outputs=Structured(json='{"enum":[1,2,3,4,5,6,7,8,9,0]}')), "max_schema_values"),
        (Params(structured_outputs=Structured(structural_tag="x" * 2000)), "max_grammar_kib"),
        (Params(structured_outputs=Structured(choice=["a"] * 4)), "max_choices"),
        (Params(structured_outputs=Structured(choice=["a" * 2000])), "max_grammar_kib"),
        (Params(structured_outputs=Structured(regex="a" * 51)), "max_regex_chars"),
        (Params(structured_outputs=Structured(regex="(a+)+{1,21}")), "max_regex_repeat"),
        (Params(structured_outputs=Structured(regex="a{99999999999999999999}")), "max_regex_repeat"),
        (Params(structured_outputs=Structured(grammar="x" * 2000)), "max_grammar_kib"),
        (
            Params(structured_outputs=Structured(grammar='start: "a" | "b" | "c" | "d" | "e"')),
            "max_grammar_rules",
        ),
        (
            Params(structured_outputs=Structured(grammar="\n".join(f"r{i} ::= 'a'" for i in range(5)))),
            "max_grammar",
        ),
    ],
)
def test_settings_over_a_limit_are_refused_with_its_name(params: Params, setting: str) -> None:
    with pytest.raises(InvalidRequest, match=setting):
        check_sampling(params, LIMITS)


def test_a_grammar_of_nothing_but_line_ends_is_measured_like_any_other() -> None:
    """A pattern that looked at a run of them again and again took twenty minutes for this one."""
    check_sampling(Params(structured_outputs=Structured(grammar="\n" * 200_000)), RequestLimits())


def test_measuring_a_value_stops_soon_after_the_limit() -> None:
    assert measure([[0] * 10] * 1000, 50)[0] <= 51


def test_the_longest_prompt_follows_from_the_model_unless_it_is_set() -> None:
    assert RequestLimits().prompt_chars(1000) == 16_000
    assert RequestLimits(max_prompt_chars=5).prompt_chars(1000) == 5
