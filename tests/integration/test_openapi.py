"""The OpenAPI document with vLLM's own models in it, and the page that shows it."""

from __future__ import annotations

import aiohttp
from openapi_spec_validator import OpenAPIV31SpecValidator

from engine_bridge.driver.apis.bodies import SERVER_FIELDS

from .conftest import KEYS, MODEL, Gateways, told


async def test_the_document_is_valid_and_its_examples_work(http: aiohttp.ClientSession) -> None:
    """The bodies are vLLM's, without what only the server sets."""
    found = await told(http.get("/openapi.json"))
    OpenAPIV31SpecValidator(found).validate()
    assert found["openapi"].startswith("3.1")
    for name in ("ChatCompletion", "Completion", "Responses", "AnthropicMessages"):
        fields = found["components"]["schemas"][f"{name}Request"]["properties"]
        assert {"model", "temperature", "kv_hints", "session_id", "priority"} <= fields.keys()
        # The gateway has these two of its own.
        assert not fields.keys() & (set(SERVER_FIELDS) - {"session_id", "priority"})
        assert fields["priority"]["anyOf"][0]["minimum"] == 0
    for path, item in found["paths"].items():
        body = item.get("post", {}).get("requestBody")
        # Whose example names a folder of somebody's, or whose path a node.
        if body is None or path.endswith("lora_adapter") or "{" in path:
            continue
        example = body["content"]["application/json"]["example"]
        async with http.post(path, json=example) as response:
            assert str(response.status) in item["post"]["responses"] and response.status < 300, path
        assert example.get("model", MODEL) == MODEL


async def test_document_and_page_ask_for_no_key(gateways: Gateways, http: aiohttp.ClientSession) -> None:
    async with http.get("/openapi.json") as response:
        paths = (await response.json())["paths"]
    assert paths["/api/sessions"]["get"]["security"] == [{}, {"bearer": []}, {"x-api-key": []}]
    assert paths["/healthz"]["get"]["security"] == []
    server = await gateways(api_keys=KEYS)
    async with aiohttp.ClientSession(server.url) as http:
        found = await told(http.get("/openapi.json"))
        assert found["paths"]["/v1/models"]["get"]["security"] == [{"bearer": []}, {"x-api-key": []}]
        async with http.get("/docs") as response:
            assert response.status == 200 and response.content_type == "text/html"
            assert "default-src 'self'" in response.headers["Content-Security-Policy"]
