"""The OpenAPI document with vLLM's own models in it, and the page that shows it."""

from __future__ import annotations

import aiohttp
from openapi_spec_validator import OpenAPIV31SpecValidator

from engine_bridge.driver.apis.bodies import SERVER_FIELDS

from .conftest import KEYS, MODEL, Gateways


async def test_the_whole_document_is_valid(http: aiohttp.ClientSession) -> None:
    async with http.get("/openapi.json") as response:
        assert response.status == 200 and response.content_type == "application/json"
        found = await response.json()
    OpenAPIV31SpecValidator(found).validate()
    assert found["openapi"].startswith("3.1")


async def test_the_bodies_are_vllms_without_what_only_the_server_sets(http: aiohttp.ClientSession) -> None:
    async with http.get("/openapi.json") as response:
        schemas = (await response.json())["components"]["schemas"]
    for name in (
        "ChatCompletionRequest",
        "CompletionRequest",
        "ResponsesRequest",
        "AnthropicMessagesRequest",
    ):
        fields = schemas[name]["properties"]
        assert {"model", "temperature", "kv_hints", "session_id", "priority"} <= fields.keys()
        # The gateway has these two of its own.
        assert not fields.keys() & (set(SERVER_FIELDS) - {"session_id", "priority"})
        assert fields["priority"]["anyOf"][0]["minimum"] == 0


async def test_every_example_works(http: aiohttp.ClientSession) -> None:
    async with http.get("/openapi.json") as response:
        paths = (await response.json())["paths"]
    for path, item in paths.items():
        body = item.get("post", {}).get("requestBody")
        # Whose example names a folder of somebody's, or whose path a node.
        if body is None or path.endswith("lora_adapter") or "{" in path:
            continue
        example = body["content"]["application/json"]["example"]
        async with http.post(path, json=example) as response:
            assert str(response.status) in item["post"]["responses"] and response.status < 300, path
            assert example.get("model", MODEL) == MODEL


async def test_document_and_page_ask_for_no_key(gateways: Gateways) -> None:
    server = await gateways(api_keys=KEYS)
    async with aiohttp.ClientSession(server.url) as http:
        async with http.get("/openapi.json") as response:
            assert response.status == 200
            found = await response.json()
        assert found["paths"]["/v1/models"]["get"]["security"] == [{"bearer": []}, {"x-api-key": []}]
        async with http.get("/docs") as response:
            assert response.status == 200 and response.content_type == "text/html"
            assert "default-src 'self'" in response.headers["Content-Security-Policy"]
