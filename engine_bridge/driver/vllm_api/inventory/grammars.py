"""Structured output: vLLM's guidance backend, of which each step is bounded (`engine_bridge/driver/grammars/running.py`)."""

from engine_bridge.driver.vllm_api.features import GRAMMARS
from engine_bridge.driver.vllm_api.uses import (
    builds,
    calls,
    looks_up,
    overrides,
    owner,
    reads,
    replaces,
    writes,
)

OWNERS = (
    owner("vllm.v1.structured_output", GRAMMARS, replaces("GuidanceBackend")),
    owner(
        "vllm.v1.structured_output:StructuredOutputManager",
        GRAMMARS,
        looks_up("grammar_init", "GuidanceBackend _create_grammar"),
        replaces("_create_grammar(request)"),
        reads("backend"),
        writes("reasoner_cls"),
    ),
    owner(
        "vllm.v1.structured_output.backend_guidance",
        GRAMMARS,
        calls(
            "serialize_guidance_grammar(request_type, grammar_spec, disable_any_whitespace, disable_additional_properties)"
        ),
        replaces("validate_guidance_grammar(sampling_params, tokenizer=None)"),
    ),
    owner(
        "vllm.v1.structured_output.backend_guidance:GuidanceBackend",
        GRAMMARS,
        overrides("__post_init__()"),
        reads("disable_additional_properties disable_any_whitespace ll_tokenizer vocab_size"),
    ),
    owner(
        "vllm.v1.structured_output.backend_guidance:GuidanceGrammar",
        GRAMMARS,
        builds("ll_matcher, ll_tokenizer, vocab_size"),
        overrides(
            "fill_bitmask(bitmask, idx)",
            "accept_tokens(request_id, tokens)",
            "validate_tokens(tokens)",
            "rollback(num_tokens)",
        ),
        reads("rollback_lag"),
        writes("ll_matcher printed_error"),
    ),
    owner("vllm.v1.structured_output.request", GRAMMARS, calls("get_structured_output_key(params)")),
    owner(
        "vllm.sampling_params:SamplingParams",
        GRAMMARS,
        looks_up("_validate_structured_outputs", "validate_guidance_grammar"),
    ),
    owner(
        "vllm.sampling_params:StructuredOutputsParams",
        GRAMMARS,
        builds("*, regex"),
        calls("all_constraints_none()"),
    ),
)
