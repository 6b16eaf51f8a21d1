"""What the tests of servers say and send again and again."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

# Short names of what most tests take.
Http = aiohttp.ClientSession
Patch = pytest.MonkeyPatch
Log = pytest.LogCaptureFixture
KEYS = ("ov-first-key-for-tests-only", "ov-second-key-for-tests-only")
MODEL, ALIAS = "overture-demo", "another-name"
CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "messages")
)
HELLO: Any = [{"role": "user", "content": "Hello!"}]
BODY: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 4}


def events(stream: str) -> list[Any]:
    """The JSON of a stream's events."""
    return [json.loads(line[6:]) for line in stream.split("\n") if line.startswith("data: {")]


def bearer(key: str) -> dict[str, str]:
    """The header that holds a key."""
    return {"Authorization": f"Bearer {key}"}
