import gc
import json
import random
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

from engine_bridge.calls.tool_schemas import spaced
from engine_bridge.driver.grammars.admission import close_schema, grammar_of
from engine_bridge.driver.grammars.running import BoundedBackend, BoundedGrammar, NoRoom, take_failure
from gateway.settings.config import DEMO_MODEL_DIR

JSON, REGEX = StructuredOutputOptions.JSON, StructuredOutputOptions.REGEX
STREET = json.dumps({"type": "string", "pattern": "^.{1,60} .{1,40}$"})
# Each character of an answer is a state of its own.
COUNTING = r"([a-z]{1,990}[0-9]{1,1000}){1,1000}"


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)


MakeBackend = Callable[..., BoundedBackend]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> MakeBackend:
    def make(room_bytes: int = 1 << 30, states: int = 2000) -> BoundedBackend:
        monkeypatch.setattr(BoundedBackend, "room_bytes", room_bytes)
        monkeypatch.setattr("engine_bridge.policy.limits.grammar_room.FIRST_STATES", states)
        whitespace = SimpleNamespace(disable_any_whitespace=True, disable_additional_properties=False)
        config: Any = SimpleNamespace(structured_outputs_config=whitespace)
        return BoundedBackend(config, tokenizer=tokenizer(), vocab_size=len(tokenizer()))

    return make


class Answer:
    """Takes tokens that its grammar allows, as the engine does."""

    def __init__(self, backend: BoundedBackend, grammar: BoundedGrammar) -> None:
        self.grammar, self.seed = grammar, random.Random(0)
        self.bitmask = backend.allocate_token_bitmask(1)
        self.tokens: list[int] = []

    def allowed(self) -> list[int]:
        self.grammar.fill_bitmask(self.bitmask, 0)
        mask = self.bitmask[0].numpy().tobytes()
        ids = range(len(tokenizer()))
        return [token for token in ids if mask[token >> 3] >> (token & 7) & 1]

    def take(self, num_tokens: int) -> bool:
        """False: the grammar ended it, or the answer is complete."""
        for _ in range(num_tokens):
            tokens = [token for token in self.allowed() if token != tokenizer().eos_token_id]
            if not tokens:
                return False
            token = self.seed.choice(tokens)
            if not self.grammar.accept_tokens("answer", [token]):
                return False
            self.tokens.append(token)
        return True


def answer_of(backend: BoundedBackend, tenant: str = "", kind: Any = REGEX, spec: str = COUNTING) -> Answer:
    return Answer(backend, backend.grammar_for(tenant, kind, spec))


def test_an_answer_that_fills_up_its_lexer_goes_on_as_if_it_had_room_for_ever(backend: MakeBackend) -> None:
    small, large = backend(states=300), backend(states=200_000)
    bounded = answer_of(small)
    free = answer_of(large)
    for _ in range(30):
        assert bounded.take(10)
        assert free.grammar.accept_tokens("free", bounded.tokens[-10:])
        assert bounded.allowed() == free.allowed()


def test_draft_tokens_are_taken_back_also_where_the_grammar_was_compiled_anew(backend: MakeBackend) -> None:
    bounded = backend(states=300)
    answer = answer_of(bounded)
    assert answer.take(20)
    before = answer.allowed()
    for seed in range(20):
        answer.seed = random.Random(seed)
        assert answer.take(12)
        answer.grammar.rollback(12)
        assert answer.allowed() == before


def test_no_tenant_shares_a_grammar_or_its_time_with_another(backend: MakeBackend) -> None:
    bounded = backend()
    slow = bounded.grammar_for("one", JSON, STREET)
    other = answer_of(bounded, "another", JSON, STREET)
    slow.budget.spend(1000)
    assert not slow.accept_tokens("slow", [1])
    assert "too ambiguous" in str(take_failure("slow"))
    assert other.take(5)
    assert answer_of(bounded, "one", JSON, STREET).take(5), "nor with its own next answer"


def test_one_tenants_grammars_are_bounded_and_leave_room_for_another(backend: MakeBackend) -> None:
    bounded, grammars = backend(room_bytes=64 << 20), []
    with pytest.raises(NoRoom):
        for number in range(1000):
            grammars.append(bounded.grammar_for("greedy", REGEX, f"[a-z]{{1,{number + 1}}}"))
    assert 2 <= len(grammars) <= 20
    assert answer_of(bounded, "modest", JSON, STREET).take(5)
    grammars.clear()
    gc.collect()
    assert bounded.grammar_for("greedy", JSON, STREET), "what has ended makes room"


OBJECT = {"type": "object", "properties": {"city": {"type": "string"}}}
ANY, BY_ITSELF = {"type": "object"}, {"x-guidance": {"whitespace_flexible": True}}
CLOSED, OPEN = OBJECT | {"additionalProperties": False}, OBJECT | {"additionalProperties": True}


def test_an_object_has_no_properties_that_its_schema_does_not_name() -> None:
    """What is open on purpose stays open, and what is no schema is left for the check that refuses it."""
    schemas = ((OBJECT, CLOSED), (json.dumps(OBJECT), CLOSED), (OPEN, OPEN))
    for schema, after in (*schemas, ("{", "{"), ('"text"', "text"), ("[1]", [1])):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
        close_schema(params)
        assert params.structured_outputs is not None and params.structured_outputs.json == spaced(after)
    anything = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    close_schema(anything)
    assert anything.structured_outputs == StructuredOutputsParams(json=spaced(ANY))
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    close_schema(params)
    close_schema(SamplingParams())
    assert params.structured_outputs == StructuredOutputsParams(regex="a+")


def test_json_is_written_as_templates_write_it_unless_its_schema_says_how() -> None:
    config = SimpleNamespace(disable_any_whitespace=True, disable_additional_properties=False)
    for schema, said, is_fit in (
        (OBJECT, '{"city": "Oslo"}', True),
        (OBJECT, '{"city":"Oslo"}', False),
        (ANY, '{"a": [1, 2], "b": {"c": null}}', True),
        (ANY, '{"a":1}', False),
        (OBJECT | BY_ITSELF, '{"city":\n"Oslo"}', True),
    ):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
        close_schema(params)
        matcher = LLMatcher(LLTokenizer("byte"), grammar_of(params, config), log_level=0)
        tokens = list(said.encode())
        assert (matcher.validate_tokens(tokens) == len(tokens)) is is_fit, said
