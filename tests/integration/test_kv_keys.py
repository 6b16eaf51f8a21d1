"""KV is reused within a tenant and an adapter's version, and nowhere else."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from engine_bridge.driver.kv.kv_keys import version_of
from gateway.access.auth import tenant_of
from gateway.access.key_file import owner_of
from gateway.app import Server
from gateway.settings.config import DEMO_ADAPTERS_DIR
from overture_client.chat import ChatClient

from .conftest import Gateways, Seen, SharedNode, told
from .facts import CHAT, COMPLETIONS, KEYS, MESSAGES, MODEL, RESPONSES, Http, bearer
from .nodes import generate, load, unload


def long_question() -> str:
    """Over two KV blocks that nobody has asked before."""
    return f"My number is {uuid.uuid4().hex}. " + "Remember it well, please. " * 12


def chat_body(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4}


# By API: the path, and the body that asks `text`.
FAMILIES: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "chat": (CHAT, chat_body),
    "chat, two choices": (CHAT, lambda text: chat_body(text) | {"n": 2}),
    "completions": (COMPLETIONS, lambda text: {"prompt": text, "max_tokens": 4}),
    "completions, two prompts": (COMPLETIONS, lambda text: {"prompt": [text, text[::-1]], "max_tokens": 4}),
    "responses": (RESPONSES, lambda text: {"input": text, "max_output_tokens": 4}),
    "messages": (MESSAGES, chat_body),
}


async def call(server: Server, key: str, family: str, text: str, stream: bool, **more: Any) -> None:
    """Ask as the owner of `key`, and read the whole answer."""
    path, body = FAMILIES[family]
    whole = body(text) | more | {"model": MODEL, "stream": stream}
    async with Http(server.url, headers=bearer(key)) as http:
        await told(http.post(path, json=whole))


@pytest.mark.parametrize("family", FAMILIES)
async def test_no_tenant_meets_anothers_kv(gateways: Gateways, seen: Seen, family: str) -> None:
    """The second key's first request computes everything, its second one nothing that it computed before. Whole and streamed."""
    server, text = await gateways(api_keys=KEYS), long_question()
    for key, stream in zip(KEYS, (True, False), strict=True):
        # Of two choices in one output vLLM tells what the second found, which are the first one's blocks.
        tells_first = stream or "choices" not in family
        assert await seen.cached_in(call(server, key, family, text, stream)) == 0 or not tells_first
        assert await seen.cached_in(call(server, key, family, text, stream)) >= 64
        assert await seen.cached_in(call(server, key, family, text, not stream)) >= 64


async def test_every_request_of_a_call_has_its_tenants_salt(gateways: Gateways, seen: Seen) -> None:
    """All families, whole and streamed, each choice and each prompt; two tenants at once."""
    server = await gateways(api_keys=KEYS)
    for family in FAMILIES:
        for stream in (False, True):
            seen.salts.clear()
            text = long_question()
            await asyncio.gather(*(call(server, key, family, text, stream) for key in KEYS))
            num_each = 2 if "prompts" in family else 1
            assert None not in seen.salts and len(set(seen.salts)) == 2, family
            assert len(seen.salts) == 2 * num_each, "one submission for each prompt"


async def test_without_keys_everybody_shares(server: Server, seen: Seen) -> None:
    text = long_question()
    assert await seen.cached_in(call(server, "one", "chat", text, False)) == 0
    assert await seen.cached_in(call(server, "other", "chat", text, True)) >= 64
    assert seen.salts == [None]


async def test_a_tenants_chats_and_calls_share(gateways: Gateways, seen: Seen) -> None:
    """Chat socket and API, two sessions of one key: one copy of what they have in common. Another key's chat has its own."""
    server, text = await gateways(api_keys=KEYS), long_question()

    async def chat(key: str) -> None:
        async with ChatClient(server.url, api_key=key) as client:
            async for _ in client.ask(text, sampling={"max_tokens": 4}):
                pass

    assert await seen.cached_in(chat(KEYS[0])) == 0
    assert await seen.cached_in(chat(KEYS[0])) >= 64
    assert await seen.cached_in(call(server, KEYS[0], "chat", text, False)) >= 64
    assert await seen.cached_in(chat(KEYS[1])) == 0


@pytest.mark.parametrize("family", ["chat", "completions", "responses", "messages"])
async def test_a_salt_splits_ones_own_kv_and_opens_no_other(
    gateways: Gateways, seen: Seen, family: str
) -> None:
    """Not even the very salt that the other tenant's requests end up with."""
    server, text = await gateways(api_keys=KEYS), long_question()
    await call(server, KEYS[0], family, text, False)
    for forged in (seen.salts[0], "mine"):
        for least in (0, 64):
            cached = await seen.cached_in(call(server, KEYS[1], family, text, False, cache_salt=forged))
            assert (cached > 0) == (least > 0) and cached >= least
    assert await seen.cached_in(call(server, KEYS[1], family, text, False)) == 0


async def test_a_malformed_salt_is_refused(http: Http) -> None:
    for family in ("chat", "completions", "responses", "messages"):
        path, body = FAMILIES[family]
        for salt in (7, "", ["x"], {"a": 1}, "x" * 129):
            await told(http.post(path, json=body("Hi") | {"model": MODEL, "cache_salt": salt}), 400)


async def test_deleting_a_session_leaves_its_namesake_its_kv(gateways: Gateways, node: SharedNode) -> None:
    server, name = await gateways(api_keys=KEYS), f"same-{uuid.uuid4().hex}"
    async with Http(server.url) as http:
        for key in KEYS:
            body = chat_body(long_question()) | {"model": MODEL}
            headers = bearer(key) | {"X-Session-Id": name}
            await told(http.post(CHAT, json=body, headers=headers))
        await told(http.delete(f"/api/sessions/{name}", headers=bearer(KEYS[0])), 204)
    is_over = {
        tenant: group.is_over for (tenant, of), group in node._tiers.store._host.groups.items() if of == name
    }
    assert is_over == {tenant_of(owner_of(KEYS[0])): True, tenant_of(owner_of(KEYS[1])): False}


def test_versions_of_one_adapter_are_not_one() -> None:
    """vLLM's own requests of one name are equal, and its set of the adapters of a step would hold one of them."""
    versions = {version_of(LoRARequest("poet", number, "/poet"), "") for number in (1, 2, 2)}
    assert {version.lora_int_id for version in versions} == {1, 2}


# -- adapters ------------------------------------------------------------------------------------------------------------------------


async def answer(node: SharedNode, text: str, adapter: str) -> tuple[str, int]:
    """Text of an answer, and tokens of its prompt that were cached."""
    said = await generate(node, text, 8, adapter=adapter)
    return said.text, said.kv.device


async def test_adapters_and_the_base_share_nothing(node: SharedNode) -> None:
    text = long_question()
    for adapter in ("shout", "pirate", ""):
        assert (await answer(node, text, adapter))[1] == 0
        assert (await answer(node, text, adapter))[1] >= 64


def copy_adapter(name: str, path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(DEMO_ADAPTERS_DIR / name, path)


@pytest.mark.parametrize("in_place", [False, True])
async def test_a_new_version_under_the_old_name(node: SharedNode, tmp_path: Path, in_place: bool) -> None:
    """The file is replaced and loaded again: no KV of the old weights is met; back to the old file, its KV still counts."""
    path, text = tmp_path / "versioned", long_question()

    async def reload(name: str) -> None:
        copy_adapter(name, path)
        if in_place:
            await load(node, "versioned", path, load_inplace=True)
        else:
            await unload(node, "versioned")
            await load(node, "versioned", path)

    copy_adapter("shout", path)
    await load(node, "versioned", path)
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
        await unload(node, "versioned")
