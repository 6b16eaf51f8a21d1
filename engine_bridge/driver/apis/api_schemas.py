"""JSON schemas of the bodies and replies of vLLM's serving classes, made from its own pydantic models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.json_schema import models_json_schema

from engine_bridge.driver import vllm_api
from engine_bridge.driver.apis.bodies import SERVER_FIELDS
from engine_bridge.driver.apis.responses import InputTokens
from engine_bridge.driver.apis.tokenize_request import TokenizeBody
from engine_bridge.driver.pooling.serving import ScoreBody
from engine_bridge.protocol.node import SCHEMA_REFERENCE, ApiSchemas

REQUESTS: Mapping[str, Any] = {
    "chat": vllm_api.ChatCompletionRequest,
    "completions": vllm_api.CompletionRequest,
    "responses": vllm_api.ResponsesRequest,
    "input_tokens": vllm_api.ResponsesRequest,
    "messages": vllm_api.AnthropicMessagesRequest,
    "count_tokens": vllm_api.AnthropicCountTokensRequest,
    "tokenize": TokenizeBody,
    "detokenize": vllm_api.DetokenizeRequest,
    "embeddings": vllm_api.EmbeddingCompletionRequest,
    "rerank": vllm_api.RerankRequest,
    "score": ScoreBody,
    "load_adapter": vllm_api.LoadLoRAAdapterRequest,
    "unload_adapter": vllm_api.UnloadLoRAAdapterRequest,
}
REPLIES: Mapping[str, Any] = {
    "chat": vllm_api.ChatCompletionResponse,
    "completions": vllm_api.CompletionResponse,
    "responses": vllm_api.ResponsesResponse,
    "input_tokens": InputTokens,
    "messages": vllm_api.AnthropicMessagesResponse,
    "count_tokens": vllm_api.AnthropicCountTokensResponse,
    "tokenize": vllm_api.TokenizeResponse,
    "detokenize": vllm_api.DetokenizeResponse,
    "tokenizer_info": vllm_api.TokenizerInfoResponse,
    "embeddings": vllm_api.EmbeddingResponse,
    "rerank": vllm_api.RerankResponse,
    "score": vllm_api.ScoreResponse,
    "models": vllm_api.ModelList,
    "model": vllm_api.ModelCard,
}


def api_schemas() -> ApiSchemas:
    """Return all schemas, without the fields that clients cannot set. Takes half a second of a core: not for the event loop."""
    made, found = models_json_schema(
        [(model, "validation") for model in REQUESTS.values()]
        + [(model, "serialization") for model in REPLIES.values()],
        ref_template=SCHEMA_REFERENCE.format(name="{model}"),
    )
    components = found["$defs"]
    requests = {name: _name_of(made[model, "validation"]) for name, model in REQUESTS.items()}
    replies = {name: _name_of(made[model, "serialization"]) for name, model in REPLIES.items()}
    for name in requests.values():
        _leave_out(components[name], SERVER_FIELDS)
    return ApiSchemas(requests, replies, _reachable(components, [*requests.values(), *replies.values()]))


def _name_of(reference: Mapping[str, str]) -> str:
    return reference["$ref"].rpartition("/")[2]


def _leave_out(schema: dict[str, Any], names: tuple[str, ...]) -> None:
    if "properties" in schema:  # a schema without properties is a choice between classes
        schema["properties"] = {key: value for key, value in schema["properties"].items() if key not in names}


def _reachable(components: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the components that these name, directly or not, by name."""
    found: set[str] = set()
    while names:
        name = names.pop()
        if name not in found:
            found.add(name)
            names += _references(components[name])
    return {name: components[name] for name in sorted(found)}


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield _name_of(schema)
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)
