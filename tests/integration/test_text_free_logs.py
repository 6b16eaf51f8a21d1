"""Nothing that a user writes and no key is in the log, at its most talkative level, whichever door it comes by."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from gateway.settings import logs

from .conftest import Gateways, logging_kept
from .facts import CHAT, COMPLETIONS, KEYS, MESSAGES, MODEL, RESPONSES, Http, bearer
from .test_connections import peer_of

MARK = "Xyzzyplugh"
KEY = "ov-" + MARK + "-of-some-length"
CONTROLS = "\n2026-01-01 00:00:00 ERROR gateway: forged\x1b[31m\r\u2028"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What the server's own logging writes at `debug`; everything is as before afterwards."""
    stream = io.StringIO()
    with logging_kept():
        logs.setup("plain", "debug", stream=stream)
        yield stream


def chat(content: Any = "x", role: str = "user", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}], "max_tokens": 2} | more


LONG_NAME = MARK * 20_000
BODIES = [
    *((CHAT, body) for body in (chat(MARK), chat(MARK, stream=True), chat({MARK: MARK}, MARK))),
    (CHAT, chat([{"type": MARK, "text": MARK}])),
    (CHAT, chat(**{MARK: MARK})),
    (CHAT, chat(structured_outputs={"grammar": f"root ::= {MARK}"})),
    (CHAT, chat(structured_outputs={"regex": f"({MARK}"})),
    (CHAT, chat(structured_outputs={"regex": f"(.{{1,60}} .{{1,40}}{MARK}){{1,1000}}"})),
    (CHAT, chat(MARK, model=MARK)),
    (CHAT, {"messages": [], "kv_hints": {MARK: MARK}, "priority": MARK}),
    (COMPLETIONS, {"prompt": MARK, "max_tokens": 1}),
    (COMPLETIONS, {"prompt": [MARK, 7, None], "max_tokens": MARK}),
    (COMPLETIONS, {"prompt": MARK * 3000, "max_tokens": 1}),
    (RESPONSES, {"input": MARK, "max_output_tokens": 2}),
    (RESPONSES, {"input": MARK, "previous_response_id": MARK}),
    (MESSAGES, chat(MARK, system=MARK)),
    (f"{MESSAGES}/count_tokens", chat(MARK)),
    *(
        (path, body | {"model": LONG_NAME})
        for path, body in (
            *((CHAT, chat()), (CHAT, chat(stream=True)), (MESSAGES, chat()), (COMPLETIONS, {"prompt": "x"})),
            *((RESPONSES, {"input": "x"}), (f"{MESSAGES}/count_tokens", chat())),
            *(("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})),
            ("/v1/advisories", {"session_id": "x"}),
            ("/v1/load_lora_adapter", {"lora_name": LONG_NAME, "lora_path": MARK}),
            ("/v1/unload_lora_adapter", {"lora_name": LONG_NAME}),
        )
    ),
    ("/v1/advisories", {"session_id": MARK, "model": MARK, "draft": MARK}),
    ("/v1/advisories", {"session_id": MARK, "draft": MARK}),
    ("/api/sessions", {"title": MARK}),
    ("/api/sessions", {"title": MARK + CONTROLS, MARK: MARK}),
    ("/v1/load_lora_adapter", {"lora_name": "x" + CONTROLS, "lora_path": "/nowhere"}),
]


async def test_no_door_lets_text_or_keys_into_the_log(gateways: Gateways, log: io.StringIO) -> None:
    server = await gateways(
        api_keys=(KEY,), operator_keys=(KEYS[0],), allow_adapter_loading=True, draft_prefill=True
    )
    async with Http(server.url, headers=bearer(KEY)) as http:
        session = {"X-Session-Id": MARK, "X-Agent-Name": MARK, "X-Workflow-Id": MARK}
        asked = [http.post(path, json={"model": MODEL} | body, headers=session) for path, body in BODIES]
        for path in (
            f"/api/sessions?q={MARK}",
            f"/api/sessions?q=%22{MARK}",
            f"/{MARK}?{MARK}",
            f"/static/{MARK}",
        ):
            asked.append(http.get(path))
        for path in (f"/api/sessions/{MARK}", f"/v1/adapters/{quote(MARK + CONTROLS)}/pin"):
            asked.append(http.delete(path))
        for each in asked:
            async with each as response:
                assert response.status < 500, (response.url, await response.text())
                await response.read()
        await over_the_socket(http)
    for head in (
        f"GET / HTTP/1.1\r\nHost: x\r\nX-Api-Key : {KEY}\r\n\r\n",
        f"GET / HTTP/1.1\r\nHost: x\r\nX-Api-Key: {KEY}\x00\r\n\r\n",
        f"GET / HTTP/1.1\r\nHost: x\r\n{KEY}\r\n\r\n",
        f"{MARK} / {MARK}\r\n\r\n",
        f"GET /{MARK}\r\nAuthorization: Bearer {KEY}\r\n\r\n",
        f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {MARK}\r\n\r\n",
        f"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{MARK}\r\n",
    ):
        await (await peer_of(server)).rest(head.encode())
    text = log.getvalue()
    assert "head was not understood" in text, "what is malformed is logged, if not quoted"
    lines = text.splitlines()
    assert [line for line in lines if MARK in line] == []
    assert [line for line in lines if "ERROR" in line] == [], "what clients do wrong is no error here"
    assert max(map(len, lines)) < 10_000
    assert all(line[:4].isdigit() or line.startswith("    ") for line in lines)


async def over_the_socket(http: Http) -> None:
    """All frames, with the mark wherever there is room for it."""
    async with http.ws_connect("/ws") as ws:
        for frame in (
            {"type": "hello", "api_key": KEY},
            {"type": "hello", "session_id": MARK},
            {"type": "hello", "resume": [{"id": MARK, "seq": 1}]},
            {"type": "message", "id": MARK, "content": MARK, "sampling": {"max_tokens": 2, "stop": [MARK]}},
            {"type": "message", "id": MARK + "2", "content": MARK, "adapter": MARK},
            {"type": "message", "id": MARK + "3", "content": MARK, "sampling": {MARK: MARK}},
            {"type": "typing", "session_id": MARK, "draft": MARK + " and more"},
            {"type": "typing", "adapter": MARK, "draft": MARK},
            {"type": "stop", "id": MARK},
            {"type": MARK},
        ):
            await ws.send_json(frame)
        await ws.send_str(MARK)
        await ws.send_json({"type": "ping", "t": MARK})
        async with asyncio.timeout(60):
            seen: set[str] = set()
            while not {"pong", "done"} <= seen and "error:" + MARK not in seen:
                frame = await ws.receive_json()
                seen |= {frame["type"], f"{frame['type']}:{frame.get('id')}"}
