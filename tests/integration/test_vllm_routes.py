"""What tools expect of `vllm serve` beside its APIs."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.errors import StartupError
from overture_client import __version__
from tests.unit.cluster.test_trust import certified

from .conftest import KEYS, MODEL, Gateways

HELLO = [{"role": "user", "content": "Hello, how are you?"}]


async def posted(http: aiohttp.ClientSession, path: str, body: Any) -> Any:
    async with http.post(path, json=body) as response:
        return await response.json()


async def test_probes_and_figures(http: aiohttp.ClientSession) -> None:
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        async with http.request(method, path) as response:
            assert response.status == 200, path
    async with http.get("/version") as response:
        found = await response.json()
    assert found["overture"] == __version__ and found["version"][0].isdigit()
    async with http.get("/load") as response:
        assert await response.json() == {"server_load": 0}


async def test_a_text_comes_back_from_its_tokens(http: aiohttp.ClientSession) -> None:
    text = "Where is the harbour?"
    found = await posted(http, "/tokenize", {"model": MODEL, "prompt": text, "return_token_strs": True})
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) > 1
    assert found["max_model_len"] == 4096
    assert (await posted(http, "/detokenize", {"tokens": found["tokens"]}))["prompt"] == text


async def test_a_conversation_has_the_tokens_of_its_prompt(http: aiohttp.ClientSession) -> None:
    found = await posted(http, "/tokenize", {"model": "pirate", "messages": HELLO})
    answer = await posted(http, "/v1/chat/completions", {"model": MODEL, "messages": HELLO, "max_tokens": 1})
    assert found["count"] == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"messages": "x"}, 400),
        ("/tokenize", {"model": "nope", "prompt": "x"}, 404),
        ("/detokenize", {"tokens": "x"}, 400),
        ("/detokenize", {"tokens": [2**40]}, 400),
        ("/tokenize", {"prompt": "x" * 100_000}, 400),
    ],
)
async def test_what_cannot_be_tokenised_is_an_error_in_the_usual_form(
    http: aiohttp.ClientSession, path: str, body: Any, status: int
) -> None:
    async with http.post(path, json=body) as response:
        assert response.status == status
        assert isinstance((await response.json())["error"]["code"], str)


async def test_figures_and_tokens_ask_for_a_key_and_probes_do_not(gateways: Gateways) -> None:
    server = await gateways(api_keys=KEYS)
    async with aiohttp.ClientSession(server.url) as http:
        for method, path, status in (
            ("GET", "/health", 200),
            ("GET", "/version", 200),
            ("GET", "/load", 401),
            ("POST", "/tokenize", 401),
        ):
            async with http.request(method, path) as response:
                assert response.status == status, path


async def test_over_tls_the_api_and_the_socket_work_and_plain_http_does_not(
    gateways: Gateways, tmp_path: Path
) -> None:
    made = certified(tmp_path, "here", "127.0.0.1")
    server = await gateways(ssl_certfile=Path(made.cert), ssl_keyfile=Path(made.key))
    assert server.url.startswith("https://")
    trust = await asyncio.to_thread(ssl.create_default_context, cafile=made.cert)
    async with aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(ssl=trust)) as http:
        answer = await posted(http, "/v1/completions", {"model": MODEL, "prompt": "Hello", "max_tokens": 2})
        assert answer["usage"]["completion_tokens"] == 2
        async with http.ws_connect("/ws") as socket:
            await socket.send_json({"type": "hello"})
            assert (await socket.receive_json())["type"] == "ready"
    async with aiohttp.ClientSession() as plain:
        with pytest.raises(aiohttp.ClientError):
            await plain.get(server.url.replace("https", "http") + "/healthz")


async def test_a_certificate_that_is_none_stops_the_start(gateways: Gateways, tmp_path: Path) -> None:
    (tmp_path / "c.pem").write_text("no certificate")
    with pytest.raises(StartupError, match="ssl_certfile"):
        await gateways(ssl_certfile=tmp_path / "c.pem", ssl_keyfile=tmp_path / "c.pem")


async def test_a_prompt_that_ends_inside_a_character_is_no_part_of_its_answer(
    http: aiohttp.ClientSession,
) -> None:
    """Whole, twice, streamed, with a stop string that only the prompt has, and in the turn that a session keeps."""
    known = (await posted(http, "/tokenize", {"prompt": "my secret is 1234 "}))["tokens"]
    half = (await posted(http, "/tokenize", {"prompt": "😀"}))["tokens"][:-1]
    body = {
        "model": MODEL,
        "prompt": [*known, *half],
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "stop": ["secret"],
    }
    async with http.post("/v1/completions", json=body, headers={"X-Session-Id": "half"}) as response:
        whole = await response.json()
    assert whole["choices"][0]["finish_reason"] == "length", "the stop string stands in the prompt alone"
    twice = await posted(http, "/v1/completions", body | {"n": 2, "temperature": 1, "stop": None})
    for choice in [*whole["choices"], *twice["choices"]]:
        assert choice["text"] and not choice["text"].startswith("my secret is")
    text = whole["choices"][0]["text"]
    echoed = await posted(http, "/v1/completions", body | {"echo": True, "stop": None})
    assert echoed["choices"][0]["text"] == f"my secret is 1234 �{text}"
    async with http.post("/v1/completions", json=body | {"stream": True}) as response:
        lines = [line async for line in response.content if line.startswith(b"data: {")]
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines) == text
    async with http.get("/api/sessions/half") as response:
        assert (await response.json())["turns"][-1]["answer"] == text
