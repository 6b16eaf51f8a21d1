"""`/v1/adapters` and the adapters' metrics, on the real engine with the demo's adapters."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from gateway.app import Server, build_services
from gateway.metrics.metrics import Metrics
from gateway.settings.config import DEMO_ADAPTERS_DIR

from .conftest import KEYS, Gateways, demo_config

CHAT = "/v1/chat/completions"
PLACES = {"slot", "host", "cached", "disk"}


async def adapters_of(http: aiohttp.ClientSession) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Name -> adapter, and the stats."""
    async with http.get("/v1/adapters") as response:
        assert response.status == 200
        body = await response.json()
    assert [entry["name"] for entry in body["adapters"]] == sorted(
        entry["name"] for entry in body["adapters"]
    )
    return {entry["name"]: entry for entry in body["adapters"]}, body["stats"]


async def ask(http: aiohttp.ClientSession, adapter: str) -> None:
    body = {"model": adapter, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
    async with http.post(CHAT, json=body) as response:
        assert response.status == 200, await response.text()


async def metrics_of(http: aiohttp.ClientSession) -> dict[str, float]:
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("overture_adapter"))
    return {name: float(value) for name, value in pairs}


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    body = await response.json()
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


async def test_every_adapter_is_described(http: aiohttp.ClientSession) -> None:
    adapters, stats = await adapters_of(http)
    demo = {path.name for path in DEMO_ADAPTERS_DIR.iterdir() if (path / "adapter_config.json").is_file()}
    assert demo <= set(adapters)
    for adapter in adapters.values():
        assert adapter["rank"] > 0 and adapter["num_bytes"] > 0 and adapter["target_modules"]
        assert re.fullmatch(r"[0-9a-f]{12}", adapter["version"])
        assert adapter["place"] in PLACES and adapter["is_pinned"] is False
    assert stats["num_adapters"] >= len(adapters)
    assert sum(stats["num_by_place"].values()) == stats["num_adapters"]
    assert 0 <= stats["host_bytes"] <= stats["host_capacity_bytes"]


async def test_a_request_shows_in_uses_place_and_metrics(http: aiohttp.ClientSession) -> None:
    before, _ = await adapters_of(http)
    first = await metrics_of(http)
    await ask(http, "pirate")
    after, stats = await adapters_of(http)
    assert after["pirate"]["num_uses"] == before["pirate"]["num_uses"] + 1
    assert abs(after["pirate"]["last_used_at"] - time.time()) < 60
    assert after["pirate"]["place"] != "disk"
    second = await metrics_of(http)
    name = "overture_adapter_requests_total"
    assert (
        sum(second[f'{name}{{place="{place}"}}'] - first[f'{name}{{place="{place}"}}'] for place in PLACES)
        == 1
    )
    assert sum(second[f'overture_adapters{{place="{place}"}}'] for place in PLACES) == stats["num_adapters"]
    assert second["overture_adapter_host_bytes"] <= second["overture_adapter_host_capacity_bytes"]
    assert second["overture_adapter_step_seconds_total"] >= first["overture_adapter_step_seconds_total"]


async def test_pin_and_unpin(gateways: Gateways) -> None:
    server = await gateways(allow_adapter_loading=True)
    async with aiohttp.ClientSession(server.url) as http:
        for method, is_pinned in (("POST", True), ("POST", True), ("DELETE", False), ("DELETE", False)):
            async with http.request(method, "/v1/adapters/shout/pin") as response:
                assert response.status == 200
                body = await response.json()
            assert body["name"] == "shout" and body["is_pinned"] is is_pinned
            adapters, _ = await adapters_of(http)
            assert adapters["shout"]["is_pinned"] is is_pinned


@pytest.mark.parametrize("method", ["POST", "DELETE"])
@pytest.mark.parametrize("name", ["nobody", "a/b", "../x", "ümlaut ?#", "x" * 5000, "overture-demo"])
async def test_an_unknown_name_is_404_in_the_apis_shape(gateways: Gateways, method: str, name: str) -> None:
    server = await gateways(allow_adapter_loading=True)
    async with (
        aiohttp.ClientSession(server.url) as http,
        http.request(method, f"/v1/adapters/{quote(name, safe='')}/pin") as response,
    ):
        assert response.status == 404
        error = await error_of(response)
    assert error["code"] == "model_not_found" and len(error["message"]) < 300


async def test_only_where_the_operator_allows_it(server: Server, gateways: Gateways) -> None:
    async with aiohttp.ClientSession(server.url) as http:
        async with http.post("/v1/adapters/shout/pin") as response:
            assert response.status == 400
            assert "--allow-adapter-loading" in (await error_of(response))["message"]
        adapters, _ = await adapters_of(http)
    assert adapters["shout"]["is_pinned"] is False


async def test_a_key_is_asked_for_where_the_server_does(gateways: Gateways) -> None:
    server = await gateways(api_keys=KEYS, allow_adapter_loading=True)
    async with aiohttp.ClientSession(server.url) as http:
        for method, path in (
            ("GET", "/v1/adapters"),
            ("POST", "/v1/adapters/shout/pin"),
            ("DELETE", "/v1/adapters/shout/pin"),
        ):
            async with http.request(method, path) as response:
                assert response.status == 401, path
                assert (await error_of(response))["code"] == "unauthorized"
        async with http.get("/v1/adapters", headers={"Authorization": f"Bearer {KEYS[0]}"}) as response:
            assert response.status == 200


async def test_before_the_engine_is_up_there_is_nothing_to_tell(tmp_path: Path) -> None:
    config = demo_config(tmp_path / "unstarted", allow_adapter_loading=True, kv_host_gib=0)
    services = await build_services(config, metrics=Metrics(CollectorRegistry()))
    async with Server(services) as server, aiohttp.ClientSession(server.url) as http:
        async with http.get("/v1/adapters") as response:
            assert await response.json() == {"adapters": [], "stats": None}
        assert await metrics_of(http) == {}
        async with http.post("/v1/adapters/shout/pin") as response:
            assert response.status == 503
            assert (await error_of(response))["code"] == "starting"
