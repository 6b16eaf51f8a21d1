"""JSON schemas as the grammars of a request are made of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from engine_bridge.driver.grammars.admission import close_schema

OPEN = {"type": "object", "properties": {"city": {"type": "string"}}}


def after(schema: Any) -> Any:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    close_schema(params)
    assert params.structured_outputs is not None
    return params.structured_outputs.json


@pytest.mark.parametrize("schema", [OPEN, json.dumps(OPEN)])
def test_an_object_has_no_properties_that_its_schema_does_not_name(schema: Any) -> None:
    assert after(schema) == OPEN | {"additionalProperties": False}


def test_what_is_open_on_purpose_stays_open() -> None:
    schema = OPEN | {"additionalProperties": True}
    assert after(schema) == schema


@pytest.mark.parametrize("schema", ["{", '"text"', "[1]"])
def test_what_is_no_schema_is_left_for_the_check_that_refuses_it(schema: str) -> None:
    assert after(schema) in (schema, json.loads(schema) if schema != "{" else schema)


def test_a_request_without_a_schema_has_none_afterwards() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    close_schema(params)
    assert params.structured_outputs is not None
    assert params.structured_outputs.json is None and params.structured_outputs.regex == "a+"
    close_schema(SamplingParams())
