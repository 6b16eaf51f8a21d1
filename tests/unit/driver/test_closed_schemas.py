import json

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from engine_bridge.driver.grammars.admission import close_schema

OBJECT = {"type": "object", "properties": {"city": {"type": "string"}}}
CLOSED, OPEN = OBJECT | {"additionalProperties": False}, OBJECT | {"additionalProperties": True}


def test_an_object_has_no_properties_that_its_schema_does_not_name() -> None:
    """What is open on purpose stays open, and what is no schema is left for the check that refuses it."""
    schemas = ((OBJECT, CLOSED), (json.dumps(OBJECT), CLOSED), (OPEN, OPEN))
    for schema, after in (*schemas, ("{", "{"), ('"text"', "text"), ("[1]", [1])):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
        close_schema(params)
        assert params.structured_outputs is not None and params.structured_outputs.json == after
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    close_schema(params)
    close_schema(SamplingParams())
    assert params.structured_outputs == StructuredOutputsParams(regex="a+")
