"""What tools expect of `vllm serve` beside its APIs."""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.app import Server
from gateway.errors import StartupError
from gateway.settings.config import DEMO_MODEL_DIR
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


async def test_a_bad_word_is_banned_with_and_without_its_space(http: aiohttp.ClientSession) -> None:
    """ " tree" is one token of the demo model's, "tree" are four."""
    (tree,) = (await posted(http, "/tokenize", {"prompt": " tree"}))["tokens"]
    body = {
        "model": MODEL,
        "prompt": "Hello my friend",
        "max_tokens": 4,
        "temperature": 0,
        "logit_bias": {str(tree): 100},
    }
    assert (await posted(http, "/v1/completions", body))["choices"][0]["text"] == " tree" * 4
    for word in ("tree", " tree"):
        answer = await posted(http, "/v1/completions", body | {"bad_words": [word]})
        assert "tree" not in answer["choices"][0]["text"]
    other = await posted(http, "/v1/completions", body | {"bad_words": ["Tree"]})
    assert "tree" in other["choices"][0]["text"], "capitals are as they are given"


async def test_a_model_that_is_called_like_an_error_is_a_model_that_there_is_not(
    http: aiohttp.ClientSession,
) -> None:
    body = {"model": "context length", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"):
        async with http.post(path, json=body) as response:
            found = await response.json()
            assert response.status == 404 and "does not exist" in found["error"]["message"], path


async def test_blanks_are_banned_as_they_are_and_many_words_at_once(http: aiohttp.ClientSession) -> None:
    (line_end,) = (await posted(http, "/tokenize", {"prompt": "\n"}))["tokens"]
    body = {
        "model": MODEL,
        "prompt": "Hello my friend",
        "max_tokens": 3,
        "temperature": 0,
        "logit_bias": {str(line_end): 100},
    }
    assert (await posted(http, "/v1/completions", body))["choices"][0]["text"] == "\n" * 3
    many = ["\n", *(f"word {number}" for number in range(200))]
    fields = {"bad_words": many, "n": 2, "temperature": 1, "return_token_ids": True}
    answer = await posted(http, "/v1/completions", body | fields)
    assert not any(line_end in choice["token_ids"] for choice in answer["choices"])


async def test_a_prompt_that_is_only_repeated_is_neither_answered_nor_counted(
    http: aiohttp.ClientSession,
) -> None:
    body = {"model": MODEL, "prompt": "Hello there", "max_tokens": 0, "echo": True}
    for more in ({}, {"logprobs": 1}, {"return_token_ids": True}, {"logprobs": 1, "return_token_ids": True}):
        found = await posted(http, "/v1/completions", body | more)
        (choice,) = found["choices"]
        assert choice["text"] == "Hello there" and choice["finish_reason"] == "length"
        assert found["usage"]["completion_tokens"] == 0 and not choice["token_ids"]
        assert "logprobs" not in more or choice["logprobs"]["tokens"] == ["Hello", " there"]
    async with http.post("/v1/completions", json=body | {"stream": True, "logprobs": 1}) as response:
        lines = [line async for line in response.content if line.startswith(b"data: {")]
    choices = [json.loads(line[6:])["choices"][0] for line in lines]
    assert "".join(choice["text"] for choice in choices) == "Hello there"
    assert [token for choice in choices for token in choice["logprobs"]["tokens"]] == ["Hello", " there"]


async def test_the_tokenizers_settings_hold_what_clients_need_and_no_paths(
    http: aiohttp.ClientSession,
) -> None:
    async with http.get("/tokenizer_info") as response:
        found = await response.json()
    assert found["tokenizer_class"] and found["eos_token"] and "messages" in found["chat_template"]
    assert str(DEMO_MODEL_DIR) not in json.dumps(found)


async def test_a_slash_behind_a_route_leads_to_the_route(server: Server, http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/completions/?a=1", json={}, allow_redirects=False) as response:
        assert response.status == 307 and response.headers["Location"] == "/v1/completions?a=1"
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 1}
    assert (await posted(http, "/v1/completions/", body))["usage"]["completion_tokens"] == 1
    for path in ("/v1/nothing/", "//example.org/v1/models/", "/"):
        async with http.get(f"{server.url}{path}", allow_redirects=False) as response:
            assert response.status == (200 if path == "/" else 404), path
            assert "Location" not in response.headers


async def test_bodies_in_the_encodings_that_programs_send(http: aiohttp.ClientSession) -> None:
    text = json.dumps({"prompt": "é"}, ensure_ascii=False)
    packed = gzip.compress(text.encode())
    for data, headers in (
        (text.encode("utf-8-sig"), {}),
        (text.encode("utf-16"), {}),
        (packed, {"Content-Encoding": "x-gzip"}),
    ):
        async with http.post("/tokenize", data=data, headers=headers) as response:
            assert response.status == 200
    async with http.post("/tokenize", data=b"\xfe\xff\xd8\x00\x00") as response:
        assert response.status == 400
