"""KV is reused within a tenant and an adapter's version, and nowhere else."""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from vllm.lora.request import LoRARequest

from engine_bridge.adapters import catalog
from engine_bridge.driver.kv.kv_keys import cache_salt, version_of
from engine_bridge.driver.serving.engine_client import BridgeEngineClient
from engine_bridge.protocol.node import ChatMessage, GenerateRequest, RequestId, Sampling
from engine_bridge.protocol.request_context import RequestContext
from gateway.access.auth import owner_of, tenant_of
from gateway.app import Server
from gateway.settings.config import DEMO_ADAPTERS_DIR
from overture_client.chat import ChatClient

from .conftest import KEYS, MODEL, Gateways, SharedNode


def long_question() -> str:
    """Over two KV blocks that nobody has asked before."""
    return f"My number is {uuid.uuid4().hex}. " + "Remember it well, please. " * 12


def chat_body(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4}


# By API: the path, and the body that asks `text`.
FAMILIES: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", chat_body),
    "chat, two choices": ("/v1/chat/completions", lambda text: chat_body(text) | {"n": 2}),
    "completions": ("/v1/completions", lambda text: {"prompt": text, "max_tokens": 4}),
    "completions, two prompts": (
        "/v1/completions",
        lambda text: {"prompt": [text, text[::-1]], "max_tokens": 4},
    ),
    "responses": ("/v1/responses", lambda text: {"input": text, "max_output_tokens": 4}),
    "messages": ("/v1/messages", chat_body),
}


async def call(server: Server, key: str, family: str, text: str, stream: bool, **more: Any) -> None:
    """Ask as the owner of `key`, and read the whole answer."""
    path, body = FAMILIES[family]
    whole = body(text) | more | {"model": MODEL, "stream": stream}
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(server.url, headers=headers) as http, http.post(path, json=whole) as r:
        assert r.status == 200, await r.text()
        await r.read()


@dataclass
class Engine:
    """What reached the engine: the salts of requests, in order, and the prompt tokens that each found in the cache."""

    salts: list[str | None] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    cached: dict[str, int] = field(default_factory=dict)

    async def cached_in(self, call: Awaitable[None]) -> int:
        """Prompt tokens that were not computed in a call: of its first request, and of that the choice that found least."""
        self.salts.clear()
        self.ids.clear()
        self.cached.clear()
        await call
        return self.cached[self.ids[0]]


@pytest.fixture
def engine(node: SharedNode, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Reads along between the node and its engine. Replies do not say it all: one of the Messages API has no cached tokens."""
    engine, submit, deliver = Engine(), BridgeEngineClient.submit, node._thread._on_outputs

    def note_salt(self: BridgeEngineClient, *args: Any, **kwargs: Any) -> Any:
        unique_id, request = submit(self, *args, **kwargs)
        engine.salts.append(request.cache_salt)
        engine.ids.append(unique_id)
        return unique_id, request

    def note_cached(outputs: list[Any]) -> None:
        for output in outputs:
            least = engine.cached.get(output.request_id, output.num_cached_tokens)
            engine.cached[output.request_id] = min(least, output.num_cached_tokens)
        deliver(outputs)

    monkeypatch.setattr(BridgeEngineClient, "submit", note_salt)
    monkeypatch.setattr(node._thread, "_on_outputs", note_cached)
    return engine


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_no_tenant_meets_anothers_kv(
    gateways: Gateways, engine: Engine, family: str, stream: bool
) -> None:
    """The second key's first request computes everything, its second one nothing that it computed before."""
    server, text = await gateways(api_keys=KEYS), long_question()
    # Of two choices in one output vLLM tells what the second found, which are the first one's blocks.
    tells_first = stream or "choices" not in family
    for key in KEYS:
        assert await engine.cached_in(call(server, key, family, text, stream)) == 0 or not tells_first
        assert await engine.cached_in(call(server, key, family, text, stream)) >= 64
        assert await engine.cached_in(call(server, key, family, text, not stream)) >= 64


async def test_every_request_of_a_call_has_its_tenants_salt(gateways: Gateways, engine: Engine) -> None:
    """All families, whole and streamed, each choice and each prompt; two tenants at once."""
    server = await gateways(api_keys=KEYS)
    for family in FAMILIES:
        for stream in (False, True):
            engine.salts.clear()
            text = long_question()
            await asyncio.gather(*(call(server, key, family, text, stream) for key in KEYS))
            num_each = 2 if "prompts" in family else 1
            assert None not in engine.salts and len(set(engine.salts)) == 2, family
            assert len(engine.salts) == 2 * num_each, "one submission for each prompt"


async def test_without_keys_everybody_shares(server: Server, engine: Engine) -> None:
    text = long_question()
    assert await engine.cached_in(call(server, "one", "chat", text, False)) == 0
    assert await engine.cached_in(call(server, "other", "chat", text, True)) >= 64
    assert engine.salts == [None]


async def test_a_tenants_chats_and_calls_share(gateways: Gateways, engine: Engine) -> None:
    """Chat socket and API, two sessions of one key: one copy of what they have in common. Another key's chat has its own."""
    server, text = await gateways(api_keys=KEYS), long_question()

    async def chat(key: str) -> None:
        async with ChatClient(server.url, api_key=key) as client:
            async for _ in client.ask(text, sampling={"max_tokens": 4}):
                pass

    assert await engine.cached_in(chat(KEYS[0])) == 0
    assert await engine.cached_in(chat(KEYS[0])) >= 64
    assert await engine.cached_in(call(server, KEYS[0], "chat", text, False)) >= 64
    assert await engine.cached_in(chat(KEYS[1])) == 0


@pytest.mark.parametrize("family", ["chat", "completions", "responses", "messages"])
async def test_a_clients_salt_splits_its_own_kv_and_opens_no_others(
    gateways: Gateways, engine: Engine, family: str
) -> None:
    """Not even the very salt that the other tenant's requests end up with."""
    server, text = await gateways(api_keys=KEYS), long_question()
    await call(server, KEYS[0], family, text, False)
    for forged in (engine.salts[0], "mine"):
        for least in (0, 64):
            cached = await engine.cached_in(call(server, KEYS[1], family, text, False, cache_salt=forged))
            assert (cached > 0) == (least > 0) and cached >= least
    assert await engine.cached_in(call(server, KEYS[1], family, text, False)) == 0


@pytest.mark.parametrize("salt", [7, "", ["x"], {"a": 1}, "x" * 129])
@pytest.mark.parametrize("family", ["chat", "completions", "responses", "messages"])
async def test_a_malformed_salt_is_refused(server: Server, family: str, salt: Any) -> None:
    path, body = FAMILIES[family]
    whole = body("Hi") | {"model": MODEL, "cache_salt": salt}
    async with aiohttp.ClientSession() as http, http.post(server.url + path, json=whole) as response:
        assert response.status == 400, await response.text()


async def test_deleting_a_session_leaves_anothers_of_the_same_name_its_kv(
    gateways: Gateways, node: SharedNode
) -> None:
    server, name = await gateways(api_keys=KEYS), f"same-{uuid.uuid4().hex}"
    for key in KEYS:
        headers = {"Authorization": f"Bearer {key}", "X-Session-Id": name}
        body = chat_body(long_question()) | {"model": MODEL}
        async with (
            aiohttp.ClientSession(server.url, headers=headers) as http,
            http.post("/v1/chat/completions", json=body) as reply,
        ):
            assert reply.status == 200, await reply.text()
    async with (
        aiohttp.ClientSession(server.url, headers={"Authorization": f"Bearer {KEYS[0]}"}) as http,
        http.delete(f"/api/sessions/{name}") as reply,
    ):
        assert reply.status == 204, await reply.text()
    assert node._tiers is not None and node._tiers.store is not None
    is_over = {
        tenant: group.is_over for (tenant, of), group in node._tiers.store._host.groups.items() if of == name
    }
    assert is_over == {tenant_of(owner_of(KEYS[0])): True, tenant_of(owner_of(KEYS[1])): False}


def test_salts_are_unambiguous() -> None:
    """Moving a letter from one part to the next makes another salt; nothing to keep apart makes none."""
    assert cache_salt("", "", None) is None
    parts = [("ab", "", None), ("a", "b", None), ("", "ab", None), ("", "", "ab"), ("a", "", "b")]
    assert len({cache_salt(*part) for part in parts}) == len(parts)


def test_versions_of_one_adapter_are_not_one() -> None:
    """vLLM's own requests of one name are equal, and its set of the adapters of a step would hold one of them."""
    versions = {version_of(LoRARequest("poet", number, "/poet"), "") for number in (1, 2, 2)}
    assert {version.lora_int_id for version in versions} == {1, 2}


# -- adapters ------------------------------------------------------------------------------------------------------------------------


async def answer(node: SharedNode, text: str, adapter: str | None) -> tuple[str, int]:
    """Text and cached tokens of a greedy answer."""
    request = GenerateRequest(
        request_id=RequestId(uuid.uuid4().hex),
        messages=(ChatMessage("user", text),),
        context=RequestContext(adapter=adapter or ""),
        sampling=Sampling(temperature=0, max_tokens=24),
    )
    deltas = [delta async for delta in node.generate(request)]
    assert deltas[-1].usage is not None
    return "".join(delta.text for delta in deltas), deltas[-1].usage.cached_tokens


async def test_adapters_and_the_base_share_nothing(node: SharedNode) -> None:
    text = long_question()
    for adapter in ("shout", "pirate", None):
        assert (await answer(node, text, adapter))[1] == 0
        assert (await answer(node, text, adapter))[1] >= 64


async def load(node: SharedNode, path: Path, **options: Any) -> None:
    reply = await node.load_adapter({"lora_name": "versioned", "lora_path": str(path)} | options)
    assert reply.status == 200, reply.body


def copy_adapter(name: str, path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(DEMO_ADAPTERS_DIR / name, path)


@pytest.mark.parametrize("in_place", [False, True])
async def test_a_new_version_under_the_old_name_and_path(
    node: SharedNode, tmp_path: Path, in_place: bool
) -> None:
    """The file is replaced and loaded again: no KV of the old weights is met; back to the old file, its KV still counts."""
    path, text = tmp_path / "versioned", long_question()

    async def reload(name: str) -> None:
        copy_adapter(name, path)
        if in_place:
            await load(node, path, load_inplace=True)
        else:
            assert (await node.unload_adapter({"lora_name": "versioned"})).status == 200
            await load(node, path)

    copy_adapter("shout", path)
    await load(node, path)
    try:
        shouted, cached = await answer(node, text, "versioned")
        assert cached == 0
        await reload("pirate")
        pirate, cached = await answer(node, text, "versioned")
        assert cached == 0 and pirate != shouted
        assert pirate == (await answer(node, text, "pirate"))[0]
        await reload("shout")
        again, cached = await answer(node, text, "versioned")
        assert cached >= 64 and again == shouted
        assert shouted == (await answer(node, text, "shout"))[0]
    finally:
        await node.unload_adapter({"lora_name": "versioned"})


async def test_two_versions_in_one_batch(node: SharedNode, tmp_path: Path) -> None:
    """An answer under way keeps the weights that it began with, next to one of the new version."""
    path, text = tmp_path / "versioned", "Hello, how are you?"

    async def long_answer(has_begun: asyncio.Event) -> str:
        request = GenerateRequest(
            request_id=RequestId(uuid.uuid4().hex),
            messages=(ChatMessage("user", text),),
            context=RequestContext(adapter="versioned"),
            sampling=Sampling(temperature=0, max_tokens=600, ignore_eos=True),
        )
        parts = []
        async for delta in node.generate(request):
            parts.append(delta.text)
            has_begun.set()
        return "".join(parts)

    copy_adapter("shout", path)
    await load(node, path)
    try:
        undisturbed = await long_answer(asyncio.Event())
        has_begun = asyncio.Event()
        disturbed = asyncio.create_task(long_answer(has_begun))
        await has_begun.wait()
        copy_adapter("pirate", path)
        await load(node, path, load_inplace=True)
        new, _ = await answer(node, text, "versioned")
        assert not disturbed.done(), "both were under way at once"
        assert new == (await answer(node, text, "pirate"))[0]
        assert await disturbed == undisturbed
    finally:
        await node.unload_adapter({"lora_name": "versioned"})


@pytest.mark.parametrize("path", ["/nowhere/at/all", "some/name-of-a-hub"])
async def test_an_adapter_that_is_not_there(node: SharedNode, path: str) -> None:
    reply = await node.load_adapter({"lora_name": "versioned", "lora_path": path})
    assert reply.status == 404, reply.body


async def test_files_that_change_while_they_are_loaded(
    node: SharedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose weights they are cannot be told: the adapter is refused, and can be loaded a moment later."""
    path = tmp_path / "versioned"
    copy_adapter("shout", path)

    def inspect_and_touch(*args: Any) -> Any:
        files = catalog_inspect(*args)
        os.utime(path / "adapter_model.safetensors")
        return files

    catalog_inspect = catalog.inspect
    with monkeypatch.context() as patched:
        patched.setattr(catalog, "inspect", inspect_and_touch)
        reply = await node.load_adapter({"lora_name": "versioned", "lora_path": str(path)})
    assert reply.status == 400 and b"changed while" in reply.body
    assert "versioned" not in {info.name for info in node.adapters()}
    await load(node, path)
    assert (await node.unload_adapter({"lora_name": "versioned"})).status == 200
