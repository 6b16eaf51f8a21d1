"""What tools expect of `vllm serve` beside its APIs."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import ssl
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from gateway.app import Server
from gateway.errors import StartupError
from gateway.settings.config import API_SWITCHES, DEMO_MODEL_DIR, SETTINGS
from overture_client import __version__
from overture_client.chat import ChatClient
from tests.unit.cluster.test_trust import certified

from .conftest import Gateways, Seen, SharedNode, ask, told
from .facts import (
    ALIAS,
    BODY,
    CHAT,
    COMPLETIONS,
    HELLO,
    KEYS,
    MESSAGES,
    MODEL,
    RESPONSES,
    Http,
    Patch,
    events,
)


async def tokenize(http: Http, **body: Any) -> Any:
    return await told(http.post("/tokenize", json=body))


async def complete(http: Http, prompt: Any, path: str = COMPLETIONS, **fields: Any) -> Any:
    """The whole reply of a greedy completion."""
    return await told(http.post(path, json={"model": MODEL, "prompt": prompt, "temperature": 0} | fields))


async def streamed(http: Http, prompt: Any, **fields: Any) -> list[Any]:
    """The choices of its events."""
    found = events(await complete(http, prompt, stream=True, **fields))
    return [event["choices"][0] for event in found]


async def test_probes_and_figures(http: Http, gateways: Gateways) -> None:
    """Figures ask for a key, and probes do not."""
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        await told(http.request(method, path))
    found = await told(http.get("/version"))
    assert found["overture"] == __version__ and found["version"][0].isdigit()
    assert await told(http.get("/load")) == {"server_load": 0}
    server = await gateways(api_keys=KEYS)
    async with Http(server.url) as stranger:
        for path, status in (("/health", 200), ("/version", 200), ("/load", 401)):
            await told(stranger.get(path), status)
        await told(stranger.post("/tokenize"), 401)


async def test_the_model_has_all_of_its_names_in_requests_and_the_first_in_replies(
    http: Http, chat: ChatClient, seen: Seen
) -> None:
    """Whichever name a conversation's requests have, they are of one model, so their KV is one."""
    first, second, *_ = (await told(http.get("/v1/models")))["data"]
    assert (first["id"], second["id"], second["root"]) == (MODEL, ALIAS, first["root"])
    assert (await told(http.get(f"/v1/models/{ALIAS}")))["id"] == ALIAS
    named: dict[str, Any] = {"model": ALIAS, "max_tokens": 4}
    session = {"X-Session-Id": "of-two-names"}
    for path, body in (
        (CHAT, named | {"messages": HELLO}),
        (COMPLETIONS, named | {"prompt": "Hello"}),
        (MESSAGES, named | {"messages": HELLO}),
        (RESPONSES, {"model": ALIAS, "input": "Hello!", "max_output_tokens": 16}),
    ):
        assert (await told(http.post(path, json=body, headers=session)))["model"] == MODEL, path
    turns = (await told(http.get("/api/sessions/of-two-names")))["turns"]
    assert len(turns) == 4 and not any(turn["adapter"] for turn in turns), (
        "no name of the model is an adapter"
    )
    await told(http.post("/v1/advisories", json={"session_id": "of-two-names", "model": ALIAS}), 202)
    long = [{"role": "user", "content": "The harbour is full of small boats. " * 8}]
    await told(http.post(CHAT, json=BODY | {"messages": long}))
    again = http.post(CHAT, json=named | {"messages": long})
    assert await seen.cached_in(told(again)) >= 32
    answer, _ = await ask(chat, "Hello!", adapter=ALIAS)
    assert answer, "a turn of the page, too"
    refused = await told(http.post(CHAT, json=BODY | {"model": "nothing"}), 404)
    assert f"{MODEL}, {ALIAS}" in refused["error"]["message"]


async def test_embeddings_are_refused_where_they_are_off_and_never_belong_to_a_session(http: Http) -> None:
    body = {"model": MODEL, "prompt_embeds": "AAAA"}
    off = await told(http.post(COMPLETIONS, json=body), 400)
    assert "--enable-prompt-embeds" in off["error"]["message"] and off["error"]["param"] == "prompt_embeds"
    refused = await told(http.post(COMPLETIONS, json=body, headers={"X-Session-Id": "of-embeddings"}), 400)
    assert "Sessions are of text" in refused["error"]["message"]
    await told(http.get("/api/sessions/of-embeddings"), 404)


async def test_a_text_comes_back_from_its_tokens(http: Http) -> None:
    """And a conversation has those of its prompt."""
    text = "Where is the harbour?"
    found = await tokenize(http, model=MODEL, prompt=text, return_token_strs=True)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) > 1
    assert found["max_model_len"] == 4096
    assert (await told(http.post("/detokenize", json={"tokens": found["tokens"]})))["prompt"] == text
    nulls = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None}
    for messages in (HELLO, [*HELLO, nulls, *HELLO]):
        found = await tokenize(http, model="pirate", messages=messages)
        answer = await told(http.post(CHAT, json=BODY | {"messages": messages}))
        assert found["count"] == answer["usage"]["prompt_tokens"]


async def test_what_cannot_be_tokenised_is_an_error_in_the_usual_form(http: Http) -> None:
    for path, body, status in (
        ("/tokenize", {}, 400),
        ("/tokenize", {"messages": "x"}, 400),
        ("/tokenize", {"model": "nope", "prompt": "x"}, 404),
        ("/detokenize", {"tokens": "x"}, 400),
        ("/detokenize", {"tokens": [2**40]}, 400),
        ("/tokenize", {"prompt": "x" * 100_000}, 400),
    ):
        assert isinstance((await told(http.post(path, json=body), status))["error"]["code"], str)


def break_off(port: int, trust: ssl.SSLContext) -> None:
    """Begin handshakes of TLS and of the chat socket, and leave at several points, also with a reset."""
    upgrade = (
        b"GET /ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    to_server = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        trust.wrap_bio(ssl.MemoryBIO(), to_server, server_hostname="127.0.0.1").do_handshake()
    for linger_s in (None, 0):
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(50), to_server.read() or b"\x16\x03\x01"):
            with socket.create_connection(("127.0.0.1", port)) as plain:
                plain.sendall(data)
                _end(plain, linger_s)
        for data in (b"", upgrade):
            inside = trust.wrap_socket(
                socket.create_connection(("127.0.0.1", port)), server_hostname="127.0.0.1"
            )
            with inside:
                inside.sendall(data)
                _end(inside, linger_s)


def _end(connection: socket.socket, linger_s: int | None) -> None:
    """Have the connection end with a reset if it lingers for no time."""
    if linger_s is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, linger_s))


async def test_over_tls_api_and_socket_work_and_plain_http_does_not(
    gateways: Gateways, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A certificate that is none stops the start."""
    made = certified(tmp_path, "here", "127.0.0.1")
    server = await gateways(ssl_certfile=Path(made.cert), ssl_keyfile=Path(made.key))
    assert server.url.startswith("https://")
    trust = await asyncio.to_thread(ssl.create_default_context, cafile=made.cert)
    async with Http(server.url, connector=aiohttp.TCPConnector(ssl=trust)) as http:
        answer = await complete(http, "Hello", max_tokens=2)
        assert answer["usage"]["completion_tokens"] == 2
        async with http.ws_connect("/ws") as chat:
            await chat.send_json({"type": "hello"})
            assert (await chat.receive_json())["type"] == "ready"
    async with Http() as plain:
        with pytest.raises(aiohttp.ClientError):
            await plain.get(server.url.replace("https", "http") + "/healthz")
    await asyncio.to_thread(break_off, server.port, trust)
    async with Http(server.url, connector=aiohttp.TCPConnector(ssl=trust)) as http:
        await told(http.get("/healthz"))
    assert not [record for record in caplog.records if record.exc_info], "who leaves early is no traceback"
    (tmp_path / "c.pem").write_text("no certificate")
    with pytest.raises(StartupError, match="ssl_certfile"):
        await gateways(ssl_certfile=tmp_path / "c.pem", ssl_keyfile=tmp_path / "c.pem")


async def test_a_prompt_that_ends_inside_a_character_is_no_part_of_its_answer(http: Http) -> None:
    """Whole, twice, streamed, with a stop string that only the prompt has, and in the turn that a session keeps."""
    known = (await tokenize(http, prompt="my secret is 1234 "))["tokens"]
    prompt = known + (await tokenize(http, prompt="😀"))["tokens"][:-1]
    wish: Any = {"max_tokens": 6, "ignore_eos": True}
    body = wish | {"model": MODEL, "prompt": prompt, "temperature": 0, "stop": ["secret"]}
    whole = await told(http.post(COMPLETIONS, json=body, headers={"X-Session-Id": "half"}))
    assert whole["choices"][0]["finish_reason"] == "length", "the stop string stands in the prompt alone"
    twice = await complete(http, prompt, **wish | {"n": 2, "temperature": 1})
    for choice in [*whole["choices"], *twice["choices"]]:
        assert choice["text"] and not choice["text"].startswith("my secret is")
    text = whole["choices"][0]["text"]
    echoed = await complete(http, prompt, **wish, echo=True)
    assert echoed["choices"][0]["text"] == f"my secret is 1234 �{text}"
    choices = await streamed(http, prompt, **wish, stop=["secret"])
    assert "".join(choice["text"] for choice in choices) == text
    assert (await told(http.get("/api/sessions/half")))["turns"][-1]["answer"] == text


async def test_bad_words_are_banned_as_they_are_and_with_and_without_their_space(http: Http) -> None:
    """ " tree" is one token of the demo model's, "tree" are four. Many at once, and blanks, too."""

    async def said(wanted: str, **fields: Any) -> Any:
        (token,) = (await tokenize(http, prompt=wanted))["tokens"]
        wish: Any = {"max_tokens": 4, "logit_bias": {str(token): 100}} | fields
        choices = (await complete(http, "Hello my friend", **wish))["choices"]
        assert all(token not in choice["token_ids"] for choice in choices if choice.get("token_ids"))
        return choices[0]["text"]

    for wanted in (" tree", "\n"):
        assert await said(wanted) == wanted * 4
    for word in ("tree", " tree"):
        assert "tree" not in await said(" tree", bad_words=[word])
    assert "tree" in await said(" tree", bad_words=["Tree"]), "capitals are as they are given"
    many = ["\n", *(f"word {number}" for number in range(200))]
    assert "\n" not in await said("\n", bad_words=many, n=2, temperature=1, return_token_ids=True)


async def test_a_model_that_is_called_like_an_error_is_a_model_that_there_is_not(http: Http) -> None:
    body = BODY | {"model": "context length"}
    for path in ("messages", "messages/count_tokens", "chat/completions"):
        error = (await told(http.post(f"/v1/{path}", json=body), 404))["error"]
        assert "does not exist" in error["message"], path


async def test_a_prompt_that_is_only_repeated_is_neither_answered_nor_counted(http: Http) -> None:
    wish: Any = {"max_tokens": 0, "echo": True}
    for more in ({}, {"logprobs": 1}, {"return_token_ids": True}, {"logprobs": 1, "return_token_ids": True}):
        found = await complete(http, "Hello there", **wish, **more)
        (choice,) = found["choices"]
        assert choice["text"] == "Hello there" and choice["finish_reason"] == "length"
        assert found["usage"]["completion_tokens"] == 0 and not choice["token_ids"]
        assert "logprobs" not in more or choice["logprobs"]["tokens"] == ["Hello", " there"]
    choices = await streamed(http, "Hello there", **wish, logprobs=1)
    assert "".join(choice["text"] for choice in choices) == "Hello there"
    assert [token for choice in choices for token in choice["logprobs"]["tokens"]] == ["Hello", " there"]


async def test_the_tokenizers_settings_hold_what_clients_need_and_no_paths(http: Http) -> None:
    found = await told(http.get("/tokenizer_info"))
    assert found["tokenizer_class"] and found["eos_token"] and "messages" in found["chat_template"]
    assert str(DEMO_MODEL_DIR) not in json.dumps(found)


async def test_a_slash_behind_a_route_leads_to_the_route(server: Server, http: Http) -> None:
    async with http.post(f"{COMPLETIONS}/?a=1", json={}, allow_redirects=False) as response:
        assert response.status == 307 and response.headers["Location"] == f"{COMPLETIONS}?a=1"
    answer = await complete(http, "Hello", f"{COMPLETIONS}/", max_tokens=1)
    assert answer["usage"]["completion_tokens"] == 1
    for path in ("/v1/nothing/", "//example.org/v1/models/", "/"):
        async with http.get(f"{server.url}{path}", allow_redirects=False) as response:
            assert response.status == (200 if path == "/" else 404), path
            assert "Location" not in response.headers


@pytest.mark.parametrize(
    "given",
    ["/v1//completions", "//v1/completions", "/v1/v1/completions", "/completions", "//v1/v1/completions/"],
)
async def test_a_base_address_with_a_slash_or_v1_too_many_leads_to_the_route(
    http: Http, server: Server, given: str
) -> None:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 1}
    url = URL(f"{server.url}{given}?a=1", encoded=True)
    async with http.post(url, json=body, allow_redirects=False) as response:
        assert response.status == 307 and response.headers["Location"] == f"{COMPLETIONS}?a=1"


async def test_editors_may_stop_at_a_dozen_strings(http: Http) -> None:
    body = {"model": MODEL, "max_tokens": 1}
    stops = [f"<|{number}|>" for number in range(12)]
    await told(http.post(COMPLETIONS, json=body | {"prompt": "Hello", "stop": stops}))
    await told(http.post(CHAT, json=body | {"messages": HELLO, "stop": stops}))
    await told(http.post(MESSAGES, json=body | {"messages": HELLO, "stop_sequences": stops}))
    await told(http.post(CHAT, json=body | {"messages": HELLO, "stop": stops * 6}), 400)


async def test_bodies_in_the_encodings_that_programs_send(http: Http) -> None:
    text = json.dumps({"prompt": "é"}, ensure_ascii=False)
    packed = gzip.compress(text.encode())
    for data, headers in (
        (text.encode("utf-8-sig"), {}),
        (text.encode("utf-16"), {}),
        (packed, {"Content-Encoding": "x-gzip"}),
    ):
        await told(http.post("/tokenize", data=data, headers=headers))
    await told(http.post("/tokenize", data=b"\xfe\xff\xd8\x00\x00"), 400)


async def test_a_batch_answers_each_conversation_as_a_call_of_its_own(http: Http, gateways: Gateways) -> None:
    path, talks = f"{CHAT}/batch", [HELLO, [{"role": "user", "content": "What is your name?"}]]
    body = {"model": MODEL, "temperature": 0, "max_tokens": 20}
    alone = [await told(http.post(CHAT, json=body | {"messages": each})) for each in talks]
    found = await told(http.post(path, json=body | {"messages": talks}))
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    assert [choice["message"] for choice in found["choices"]] == [
        one["choices"][0]["message"] for one in alone
    ]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["usage"][count] == sum(one["usage"][count] for one in alone)
    for wrong in ({"messages": HELLO}, {"messages": []}, {"stream": True}, {"n": 2}, {"tools": [{}]}):
        await told(http.post(path, json=body | {"messages": talks} | wrong), 400)
    await told(http.post(path, json=body | {"messages": talks, "model": "nobody"}), 404)
    server = await gateways(max_sequences=1)
    async with Http(server.url) as small:
        await told(small.post(path, json=body | {"messages": talks}), 400)


async def test_invocations_are_chat_or_text_completions(http: Http) -> None:
    settings = {"model": MODEL, "temperature": 0, "max_tokens": 8}
    for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "Hello"})):
        there, here = [await told(http.post(each, json=settings | body)) for each in (path, "/invocations")]
        assert there["choices"] == here["choices"] and there["object"] == here["object"]
    assert events(await told(http.post("/invocations", json=settings | {"messages": HELLO, "stream": True})))
    for wrong in ({}, [], {"input": "Hello"}):
        await told(http.post("/invocations", json=wrong), 400)


async def test_an_operator_can_have_every_stream_tell_its_usage_and_tokens_their_ids(
    node: SharedNode, gateways: Gateways, monkeypatch: Patch
) -> None:
    """By --enable-force-include-usage and --return-tokens-as-token-ids, as a proxy that counts tokens needs it of clients that do not ask."""
    from engine_bridge.driver.serving.serving import Serving  # which imports vLLM

    assert set(API_SWITCHES) <= {setting.name for setting in SETTINGS}
    serving = Serving(node._client, replace(node._serving._options, api_switches=API_SWITCHES))
    monkeypatch.setattr(node, "_serving", serving)
    server = await gateways()
    asked = {"model": MODEL, "max_tokens": 2, "stream": True, "temperature": 0}
    async with Http(server.url) as http:
        for path, what in (
            (CHAT, {"messages": HELLO, "logprobs": True}),
            (COMPLETIONS, {"prompt": "Ada", "logprobs": 1}),
        ):
            *parts, last = events(await told(http.post(path, json=asked | what)))
            assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2
            assert "token_id:" in json.dumps(parts)
        body = {"model": MODEL, "input": "Ada", "max_output_tokens": 16}
        assert (await told(http.post(RESPONSES, json=body)))["usage"]["output_tokens"]
