"""The OpenAPI document, as far as it can be made without an engine: tests/integration/test_openapi.py has the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from openapi_spec_validator import OpenAPIV31SpecValidator
from prometheus_client import CollectorRegistry

from engine_bridge.protocol.node import ApiSchemas
from gateway.app import build_app, build_services
from gateway.doors.description.openapi import document
from gateway.doors.description.operation import EngineBody
from gateway.doors.description.operations import OPERATIONS
from gateway.metrics.metrics import Metrics
from gateway.settings.config import Config

CALLS = ["chat", "completions", "responses", "messages", "count_tokens", "tokenize", "detokenize"]
# What vLLM's classes would give: the names of the calls are what the gateway goes by.
SCHEMAS = ApiSchemas(
    requests={name: f"{name}-in" for name in (*CALLS, "load_adapter", "unload_adapter")},
    replies={name: f"{name}-out" for name in (*CALLS, "tokenizer_info", "models", "model")},
    components={
        f"{name}-{way}": {"type": "object", "properties": {"n": {"type": "integer"}}}
        for name in (*CALLS, "load_adapter", "unload_adapter", "tokenizer_info", "models", "model")
        for way in ("in", "out")
    },
)


def made(**changes: Any) -> dict[str, Any]:
    return document(SCHEMAS, **({"model": "demo", "asks_for_keys": False} | changes))


@pytest.fixture
async def app(tmp_path: Path):
    services = await build_services(
        Config(data_dir=tmp_path, kv_host_gib=0, port=0), metrics=Metrics(CollectorRegistry())
    )
    yield build_app(services)
    await services.node.close()
    await services.store.close()


async def test_every_route_is_described_and_everything_described_is_a_route(app: web.Application) -> None:
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"  # which aiohttp adds to every GET
    }
    assert {(operation.method, operation.path) for operation in OPERATIONS} == routes


async def test_every_name_in_a_path_is_a_parameter_and_no_other_is() -> None:
    for operation in OPERATIONS:
        named = {part[1:-1] for part in operation.path.split("/") if part.startswith("{")}
        assert named == {item.name for item in operation.parameters if item.place == "path"}, operation.path


def test_the_document_is_valid() -> None:
    OpenAPIV31SpecValidator(made()).validate()


def test_names_of_operations_are_unique() -> None:
    assert len({operation.name for operation in OPERATIONS}) == len(OPERATIONS)


def test_keys_are_asked_for_where_the_server_asks_for_them() -> None:
    def security(asks_for_keys: bool, path: str) -> Any:
        return made(asks_for_keys=asks_for_keys)["paths"][path]["get"]["security"]

    assert security(True, "/api/sessions") == [{"bearer": []}, {"x-api-key": []}]
    assert security(False, "/api/sessions") == [{}, {"bearer": []}, {"x-api-key": []}]
    assert security(True, "/healthz") == security(False, "/healthz") == []


def test_model_calls_have_the_fields_that_the_gateway_reads_itself() -> None:
    components = made(lowest_priority=-1000)["components"]["schemas"]
    assert components["chat-in"]["properties"].keys() == {"n", "session_id", "priority", "kv_hints"}
    assert components["chat-in"]["properties"]["priority"]["anyOf"][0]["minimum"] == -1000
    assert "session_id" not in components["count_tokens-in"]["properties"]
    assert components["load_adapter-in"]["properties"].keys() == {"n"}


def test_errors_have_the_shape_of_the_api_that_is_called() -> None:
    paths = made()["paths"]
    for operation in OPERATIONS:
        replies = paths[operation.path][operation.method]["responses"]
        wanted = "AnthropicError" if operation.path.startswith("/v1/messages") else "Error"
        assert replies["403"] == {"$ref": f"#/components/responses/{wanted}403"}


def test_the_served_model_is_in_the_examples() -> None:
    body = made(model="mine")["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert body["content"]["application/json"]["example"]["model"] == "mine"


def test_two_schemas_of_one_name_are_refused() -> None:
    clash = ApiSchemas(SCHEMAS.requests, SCHEMAS.replies, SCHEMAS.components | {"Session": {}})
    with pytest.raises(ValueError, match="Session"):
        document(clash, model="demo", asks_for_keys=False)


def test_every_call_that_streams_says_so() -> None:
    for operation in OPERATIONS:
        if isinstance(operation.replies.get(200), type(None)) or not isinstance(
            operation.replies[200].shape, EngineBody
        ):
            continue
        is_streamed = operation.name in ("chat", "completions", "responses", "messages", "read_response")
        assert ("text/event-stream" in operation.replies[200].media) == is_streamed


async def test_while_the_engine_starts_there_is_no_half_document(app: web.Application) -> None:
    async with TestClient(TestServer(app)) as client:
        response = await client.get("/openapi.json")
        assert response.status == 503
        assert response.headers["Retry-After"]
        assert (await response.json())["error"]["code"] == "starting"
