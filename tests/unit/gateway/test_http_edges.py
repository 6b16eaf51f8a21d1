"""What the HTTP door says where nothing behind it is asked: heads that are too large, names of the server, responses that there are not."""

from __future__ import annotations

import aiohttp
import pytest

from .front import Gateway


@pytest.mark.parametrize(
    ("path", "headers", "says"),
    [
        ("/healthz", {"Cookie": "a=" + "a" * 9000}, "8,190 bytes"),
        ("/healthz?" + "a" * 9000, {}, "8,190 bytes"),
        ("/healthz", {f"X-{number}": "a" for number in range(200)}, "128 headers"),
    ],
)
async def test_a_head_that_is_too_large_is_told_its_bound(
    gateway: Gateway, path: str, headers: dict[str, str], says: str
) -> None:
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{gateway.server.url}{path}", headers=headers) as reply,
    ):
        assert reply.status == 431 and reply.headers["Server"] == "Overture"
        error = (await reply.json())["error"]
    assert says in error["message"] and error["code"] == "frame_too_large"
    assert "aaaa" not in error["message"]


async def test_no_answer_tells_which_versions_run_here(gateway: Gateway) -> None:
    async with aiohttp.ClientSession(gateway.server.url) as http:
        for path in ("/", "/healthz", "/nowhere", "/v1/models", "/static/js/page.js"):
            async with http.get(path) as reply:
                assert not any(char.isdigit() for char in reply.headers.get("Server", ""))
        async with http.ws_connect("/ws") as socket:
            assert socket._response.headers["Server"] == "Overture"


@pytest.mark.parametrize("query", ["", "?stream=true", "?stream=true&starting_after=3"])
async def test_a_response_that_there_is_not_is_not_found_however_it_is_asked_for(
    gateway: Gateway, query: str
) -> None:
    async with (
        aiohttp.ClientSession(gateway.server.url) as http,
        http.get(f"/v1/responses/resp_unknown{query}") as reply,
    ):
        assert reply.status == 404
        assert (await reply.json())["error"]["code"] == "not_found"
