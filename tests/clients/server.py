"""The servers that the clients ask."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from types import TracebackType
from typing import Self

from bench.live.shared.serving import demo_server
from tests.clients.catalog import Client

MODEL = "overture-demo"
LIMITS = "--kv-cache-gib 0.5 --kv-host-gib 0.25 --kv-disk-gib 0".split()
# Coding agents send prompts of 5,000 to 30,000 of the demo model's tokens. It was trained with 4,096: its answers make no sense there, and with
# positions that it has never seen it ends them at the first token. YaRN gives it positions among those that it knows.
LONG_TOKENS, TRAINED_TOKENS = 32768, 4096
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": LONG_TOKENS / TRAINED_TOKENS,
    "original_max_position_embeddings": TRAINED_TOKENS,
}
LONG_CONTEXT = [
    f"--max-model-len={LONG_TOKENS}",
    "--engine-arg=hf_overrides="
    + json.dumps({"max_position_embeddings": LONG_TOKENS, "rope_parameters": YARN}),
]


class Servers:
    """Servers with the demo model on free loopback ports, each started for the first client that needs it, until the block ends.

    Args:
        url: the address of the one server to use for all clients instead.
    """

    def __init__(self, url: str | None, say: Callable[[str], None]) -> None:
        self._given = url and url.rstrip("/").removesuffix("/v1")
        self._say = say
        self._urls: dict[bool, str] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def url_for(self, client: Client) -> str:
        """The address of the server with the context that the client needs. Raises RuntimeError where the server does not start."""
        if self._given:
            return self._given
        is_long = client.has_long_prompts
        if is_long not in self._urls:
            server = self._stack.enter_context(demo_server(*LIMITS, *(LONG_CONTEXT if is_long else [])))
            self._urls[is_long] = server.url
            self._say(f"the server {'with a long context ' if is_long else ''}is ready at {server.url}")
        return self._urls[is_long]
