"""`/v1/adapters` and the adapters' metrics, on the real engine with the demo's adapters."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gateway.app import Server
from gateway.settings.config import DEMO_ADAPTERS_DIR

from .conftest import Gateways, demo_config, metrics_of, served, told
from .facts import BODY, CHAT, KEYS, Http, bearer

PLACES = {"slot", "host", "cached", "disk"}
PIN = "/v1/adapters/shout/pin"


async def adapters_of(http: Http) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Name -> adapter, and the stats."""
    body = await told(http.get("/v1/adapters"))
    names = [entry["name"] for entry in body["adapters"]]
    assert names == sorted(names)
    return dict(zip(names, body["adapters"], strict=True)), body["stats"]


async def test_every_adapter_is_described_and_a_request_shows_in_uses_place_and_metrics(http: Http) -> None:
    before, stats = await adapters_of(http)
    assert {path.parent.name for path in DEMO_ADAPTERS_DIR.glob("*/adapter_config.json")} <= set(before)
    for adapter in before.values():
        assert adapter["rank"] > 0 and adapter["num_bytes"] > 0 and adapter["target_modules"]
        assert re.fullmatch(r"[0-9a-f]{12}", adapter["version"])
        assert adapter["place"] in PLACES and adapter["is_pinned"] is False
    assert sum(stats["num_by_place"].values()) == stats["num_adapters"] >= len(before)
    assert 0 <= stats["host_bytes"] <= stats["host_capacity_bytes"]
    first = await metrics_of(http, "overture_adapter")
    await told(http.post(CHAT, json=BODY | {"model": "pirate"}))
    after, stats = await adapters_of(http)
    assert after["pirate"]["num_uses"] == before["pirate"]["num_uses"] + 1
    assert abs(after["pirate"]["last_used_at"] - time.time()) < 60
    assert after["pirate"]["place"] != "disk"
    second = await metrics_of(http, "overture_adapter")
    names = [f'overture_adapter_requests_total{{place="{place}"}}' for place in PLACES]
    assert sum(second[name] - first[name] for name in names) == 1
    assert sum(second[f'overture_adapters{{place="{place}"}}'] for place in PLACES) == stats["num_adapters"]
    assert second["overture_adapter_host_bytes"] <= second["overture_adapter_host_capacity_bytes"]
    assert second["overture_adapter_step_seconds_total"] >= first["overture_adapter_step_seconds_total"]


async def test_pins_are_the_operators_and_for_what_there_is(server: Server, gateways: Gateways) -> None:
    async with Http(server.url) as http:
        error = (await told(http.post(PIN), 400))["error"]
        assert "--allow-adapter-loading" in error["message"]
    allowing = await gateways(allow_adapter_loading=True)
    async with Http(allowing.url) as http:
        for method, is_pinned in (("POST", True), ("POST", True), ("DELETE", False), ("DELETE", False)):
            body = await told(http.request(method, PIN))
            assert body["name"] == "shout" and body["is_pinned"] is is_pinned
            assert (await adapters_of(http))[0]["shout"]["is_pinned"] is is_pinned
        for name in ("nobody", "a/b", "../x", "ümlaut ?#", "x" * 5000, "overture-demo"):
            for method in ("POST", "DELETE"):
                path = f"/v1/adapters/{quote(name, safe='')}/pin"
                error = (await told(http.request(method, path), 404))["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert error["code"] == "model_not_found" and len(error["message"]) < 300


async def test_a_key_is_asked_for_where_the_server_does(gateways: Gateways) -> None:
    server = await gateways(api_keys=KEYS, allow_adapter_loading=True)
    async with Http(server.url) as http:
        for method, path in (
            ("GET", "/v1/adapters"),
            ("POST", PIN),
            ("DELETE", PIN),
            ("GET", "/v1/engine/state"),
        ):
            assert (await told(http.request(method, path), 401))["error"]["code"] == "unauthorized"
        await told(http.get("/v1/adapters", headers=bearer(KEYS[0])))


async def test_before_the_engine_is_up_there_is_nothing_to_tell(tmp_path: Path) -> None:
    """Of adapters, of the queue and in the metrics."""
    config = demo_config(tmp_path, allow_adapter_loading=True, kv_host_gib=0)
    async with served(config) as server, Http(server.url) as http:
        assert await told(http.get("/v1/adapters")) == {"adapters": [], "stats": None}
        assert await metrics_of(http, "overture_adapter") == {}
        text = await told(http.get("/metrics"))
        assert "overture_scheduling" not in text and "overture_lane" not in text
        for method, path in (("POST", PIN), ("GET", "/v1/engine/state")):
            assert (await told(http.request(method, path), 503))["error"]["code"] == "starting"
