"""Models whose KV is not that of full attention: what is reused of it gives the tokens that computing gives, or nothing is reused.

Runs before the shared engine starts (conftest), each engine after the one before it has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import shutil
import struct
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.live.correct.checkpoints import adapter_folders_of, folder_of
from bench.live.correct.families import FAMILIES, VOCAB_SIZE
from bench.live.correct.oracle import Oracle
from bench.live.correct.pictures import as_part, data_uri, picture
from engine_bridge.driver.apis.media import GivenMedia, check_sizes
from engine_bridge.driver.kv.kv_tiers import KvTiers, TiersConfig
from engine_bridge.local_node import LocalNode
from engine_bridge.pooling_node import PoolingNode
from engine_bridge.protocol.engine_request import ChatMessage, EngineRequest, Picture
from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.protocol.node import (
    Advisory,
    AdvisoryReport,
    Dropped,
    JsonReply,
    seen_pictures,
    unpack_token_ids,
)
from engine_bridge.settings.engine_config import EngineConfig
from gateway.settings.config import DEMO_ADAPTERS_DIR

from . import nodes
from .facts import Log
from .nodes import Said, WaitsForTheDisk, generate, request

BLOCK_TOKENS, NUM_DEVICE_BLOCKS = 32, 60
KNOWN = {family.name: family for family in FAMILIES}
_ids = itertools.count()


def text(seed: object, num_tokens: int) -> list[int]:
    return [20 + token % (VOCAB_SIZE - 20) for token in nodes.text(seed, num_tokens)]


def engine(model: Path, tiers: KvTiers | None, **changes: Any) -> AbstractAsyncContextManager[LocalNode]:
    usual = {"max_model_len": 768, "num_kv_blocks": NUM_DEVICE_BLOCKS, "max_num_seqs": 4}
    return nodes.engine(
        tiers, adapters_dir=None, model=str(model), **usual | {"enable_lora": False} | changes
    )


def tiers_in(folder: Path) -> KvTiers:
    return KvTiers(
        TiersConfig(host_bytes=64 << 20, disk_bytes=256 << 20, folder=folder), policy=WaitsForTheDisk()
    )


async def computed(node: LocalNode, prompt: Sequence[int]) -> list[int]:
    """What is answered where nothing can be reused: to somebody who has never asked before."""
    said = await generate(node, prompt, tenant=f"newcomer-{next(_ids)}")
    assert said.kv.recomputed == len(prompt)
    return said.token_ids


async def fill_the_device(node: LocalNode) -> None:
    """With what nobody asks for again. All at once, so that none lives on the blocks that another's window has left."""
    others = [text(next(_ids), 600) for _ in range(4)]
    await asyncio.gather(
        *(generate(node, other, tenant=f"other-{next(_ids)}", num_tokens=1) for other in others)
    )


async def test_where_every_layer_has_a_window_what_is_reused_is_what_was_computed(tmp_path: Path) -> None:
    """Also what was computed ahead, which the device has in part, what comes back after a restart, and nothing of another RoPE."""
    model, folder = folder_of(KNOWN["mistral-window"]), tmp_path / "kv"
    system = text("system", 230)
    long = system + text("ahead", 200)
    prompts = [system + text(at, 90) for at in range(2)] + [long]
    async with engine(model, tiers_in(folder)) as node:
        # Nobody has asked for it yet, so the tiers have nothing of it, and the device by and by only what is in the window.
        for end in range(4 * BLOCK_TOKENS, len(long), 4 * BLOCK_TOKENS):
            await node.prefill(request(long[:end], session_id="s"))
        right = [await computed(node, prompt) for prompt in prompts]
        assert (await generate(node, long, session_id="s")).token_ids == right[-1]
        assert await reused_rightly(node, prompts, right)
        assert await node.run_on_engine(null_block_is_untouched)
    # Two threads, where others have one: matrix products that vLLM keeps are right for one number only.
    async with engine(model, tiers_in(folder), max_num_seqs=3, cpu_threads=2) as node:
        assert await reused_rightly(node, prompts, right)
    overrides = 'hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}'
    async with engine(model, tiers_in(folder), engine_args=(overrides,)) as node:
        said = await generate(node, long, session_id="s")
        assert said.num_reused == 0, "it is another model's KV"
        assert said.token_ids == await computed(node, long) != right[-1]


async def reused_rightly(
    node: LocalNode, prompts: Sequence[list[int]], right: Sequence[Sequence[int]], **asked: Any
) -> int:
    """How many tokens of prompts were not computed, the device having been filled with others' before each."""
    num_tokens = 0
    for number in range(2 * len(prompts)):
        await fill_the_device(node)
        which = number % len(prompts)
        said = await generate(node, prompts[which], session_id=f"s{which}", **asked)
        assert said.token_ids == right[which], said.kv
        num_tokens += said.num_reused
    return num_tokens


def null_block_is_untouched(driver: Any) -> bool:
    from engine_bridge.driver.in_process import kv_caches_of

    return not any(layer[0].any() for layer in kv_caches_of(driver.engine))


def blocks_are_rows(driver: Any) -> bool:
    from engine_bridge.driver.in_process import kv_caches_of
    from engine_bridge.driver.memory.block_copy import own_memory

    return own_memory(kv_caches_of(driver.engine))


async def test_where_vllm_reuses_no_kv_neither_does_this_server(tmp_path: Path, caplog: Log) -> None:
    model, folder = folder_of(KNOWN["deepseek-mla"]), tmp_path / "kv"
    prompt = text("prompt", 300)
    reports: list[AdvisoryReport] = []
    with caplog.at_level(logging.WARNING, "engine_bridge.driver.kv.kv_tiers"):
        async with engine(model, tiers_in(folder)) as node:
            first, second = [await generate(node, prompt, session_id="s") for _ in range(2)]
            assert first.token_ids == second.token_ids and second.kv.recomputed == len(prompt)
            assert await node.prefill(request(prompt, session_id="s")) == 0
            await node.advise(Advisory(advisory_id="a", session_id="s"), reports.append)
            assert node.figures().kv_tiers is None and node.peer_address == ""
            node.end_session("", "s")
            await generate(node, prompt)  # behind the report on the engine's thread
    assert [report.state for report in reports] == ["unknown"]
    assert [record.message for record in caplog.records if "KV tiers are off" in record.message] == [
        "the KV tiers are off: vLLM computes every prompt of this model anew here (its prefix caching is off)"
    ]
    assert not folder.exists()
    assert not Oracle(model).num_wrong(prompt, first.token_ids)


async def test_queries_grow_behind_the_context_that_a_model_was_first_trained_with() -> None:
    model, prompts = folder_of(KNOWN["ministral3"]), [text(at, 700) for at in range(2)]
    oracle = Oracle(model)
    async with engine(model, None) as node:
        for prompt in prompts:
            assert oracle.num_wrong(prompt, await computed(node, prompt)) == 0


async def test_a_server_starts_without_what_its_model_cannot_have(tmp_path: Path) -> None:
    """What it has all the same gives the tokens that transformers computes."""
    prompts = [text(at, 300) for at in range(3)]
    for family, mechanisms, num_blocks in (
        # Layers with a window beside layers without: four groups of one layer share the memory of one, so a block holds a quarter of the layers.
        ("gemma3", [], 4 * NUM_DEVICE_BLOCKS),
        ("granite4", [], NUM_DEVICE_BLOCKS),  # recurrent layers, for which blocks are longer
        ("stablelm", ["adapters"], NUM_DEVICE_BLOCKS),
    ):
        model = folder_of(KNOWN[family])
        oracle = Oracle(model)
        settings = {"enable_lora": True, "num_kv_blocks": num_blocks}
        async with engine(model, tiers_in(tmp_path / family), **settings) as node:
            assert [each.mechanism for each in node.figures().left_out] == mechanisms
            right = [await computed(node, prompt) for prompt in prompts]
            assert not any(map(oracle.num_wrong, prompts, right))
            num_reused = await reused_rightly(node, prompts, right)
            assert num_reused > 3 * 200
            tiers = node.figures().kv_tiers
            assert tiers is not None and tiers.host.num_hits > 0, "the device had lost it"
            assert await node.run_on_engine(blocks_are_rows), "so adapters can lie in them"
            pirate = {"lora_name": "pirate", "lora_path": str(DEMO_ADAPTERS_DIR / "pirate")}
            refused = await node.load_adapter(pirate)
            assert refused.status == 400, "it fits none of these models"
            assert (b"this server runs without adapters" in refused.body) == ("adapters" in mechanisms)


async def test_an_engine_that_is_built_again_without_tiers_has_nothing_of_the_first(tmp_path: Path) -> None:
    """That a draft model's heads are of other sizes than the model's shows when memory for KV is taken."""
    drafts = {
        "method": "draft_model",
        "num_speculative_tokens": 2,
        "model": str(folder_of(KNOWN["llama-head-80"])),
    }
    settings = (f"speculative_config={json.dumps(drafts)}",)
    async with engine(folder_of(KNOWN["llama"]), tiers_in(tmp_path), engine_args=settings) as node:
        [left_out] = node.figures().left_out
        assert left_out.mechanism == "KV tiers" and "different sizes" in left_out.why
        prompt = text("prompt", 100)
        right = await computed(node, prompt)
        again = [await generate(node, prompt) for _ in range(2)]
        assert again[1].token_ids == right and again[1].num_reused > 0


async def test_where_no_layer_is_to_take_adapters_a_model_is_served_without_any() -> None:
    wished = ("lora_target_modules=no_such_layer",)
    async with engine(folder_of(KNOWN["llama"]), None, enable_lora=True, engine_args=wished) as node:
        [left_out] = node.figures().left_out
        assert left_out.mechanism == "adapters" and "none of its layers" in left_out.why
        assert await generate(node, text("prompt", 50))


async def test_where_layers_skip_the_prompt_its_log_probabilities_are_refused_and_the_engine_lives_on() -> (
    None
):
    """vLLM's engine fails in the step, and its own server refuses them before."""
    settings = ("kv_sharing_fast_prefill=true",)
    async with engine(folder_of(KNOWN["llama"]), None, engine_args=settings) as node:
        body = {"model": "demo", "prompt": text("prompt", 50), "max_tokens": 2}
        body |= {"prompt_logprobs": 1}
        refused = await node.serve("completions", body, {})
        assert refused.status == 400 and b"--kv-sharing-fast-prefill" in refused.body
        del body["prompt_logprobs"]
        assert (await node.serve("completions", body, {})).status == 200


async def test_beside_experts_adapters_change_what_their_merged_weights_change(tmp_path: Path) -> None:
    family = KNOWN["qwen3-moe"]
    model, adapter, prompts = (
        folder_of(family),
        adapter_folders_of(family)[0],
        [text(at, 300) for at in range(3)],
    )
    write_adapter(tmp_path / "of experts", {"model.layers.0.mlp.experts.0.up_proj": (128, 64)})
    oracle = Oracle(model)
    async with engine(model, tiers_in(tmp_path / "kv"), enable_lora=True) as node:
        assert not node.figures().left_out
        assert (await load(node, "tuned", adapter)).status == 200
        refused = await load(node, "of experts", tmp_path / "of experts")
        assert refused.status == 400 and b"experts.0.up_proj" in refused.body
        said = [(await generate(node, prompt, adapter="tuned")).token_ids for prompt in prompts]
        for prompt, tokens in zip(prompts, said, strict=True):
            assert oracle.num_wrong(prompt, tokens, adapter) == 0 < oracle.num_wrong(prompt, tokens)
        assert await reused_rightly(node, prompts, said, adapter="tuned") > 3 * 200


async def test_pictures_are_read_with_the_adapter_that_a_name_has_now(tmp_path: Path) -> None:
    """Where adapters change how a model reads pictures: what was read with an adapter's first version is none of its second one's."""
    folders = [tmp_path / str(seed) for seed in range(2)]
    for seed, folder in enumerate(folders):
        write_adapter(folder, {"model.visual.blocks.0.attn.proj": (64, 64)}, seed=seed)
    reads_by_adapter = ("enable_tower_connector_lora=true",)
    model = folder_of(KNOWN["qwen2.5-vl"])
    async with engine(model, None, enable_lora=True, max_lora_rank=8, engine_args=reads_by_adapter) as node:

        async def look(name: str, folder: Path) -> list[int]:
            """Serve an adapter under a name, and return what it says of a picture."""
            await nodes.load(node, name, folder, load_inplace=True)
            reply = await node.serve(
                "chat", about(picture(1)) | {"model": name}, {}, EngineRequest(adapter=name)
            )
            assert isinstance(reply, JsonReply) and reply.status == 200, reply
            said: list[int] = orjson.loads(reply.body)["choices"][0]["token_ids"]
            return said

        first, second = [await look(folder.name, folder) for folder in folders]
        assert first != second
        assert await look("changing", folders[0]) == first
        assert await look("changing", folders[1]) == second


async def test_adapters_on_their_way_read_pictures_as_those_that_have_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device of its own the host computes for an adapter on its way. A step with pictures has rows of several kinds: the device waits there."""
    from engine_bridge.driver.adapters import build, slots

    from .test_adapters import LateStacks

    seeing, speaking = "model.visual.blocks.0.attn.proj", "model.language_model.layers.0.self_attn.o_proj"
    write_adapter(tmp_path / "tuned", {seeing: (64, 64), speaking: (128, 128)})
    rules_of = build.Rules
    monkeypatch.setattr(slots, "make_slots", LateStacks)
    monkeypatch.setattr(build, "Rules", lambda **facts: rules_of(**facts | {"fills_from_copies": True}))
    model, settings = folder_of(KNOWN["qwen2.5-vl"]), ("enable_tower_connector_lora=true",)
    said = []
    for has_arrived in (False, True):
        monkeypatch.setattr(LateStacks, "is_open", has_arrived)
        async with engine(model, None, enable_lora=True, adapters_in_kv=False, engine_args=settings) as node:
            await nodes.load(node, "tuned", tmp_path / "tuned")
            body = about(picture(1)) | {"model": "tuned"}
            reply = await node.serve("chat", body, {}, EngineRequest(adapter="tuned"))
            assert isinstance(reply, JsonReply) and reply.status == 200, reply
            said.append(orjson.loads(reply.body)["choices"][0]["token_ids"])
    assert said[0] == said[1]


async def load(node: LocalNode, name: str, folder: Path) -> JsonReply:
    return await node.load_adapter({"lora_name": name, "lora_path": str(folder)})


def write_adapter(folder: Path, modules: Mapping[str, tuple[int, int]], seed: int = 0) -> None:
    """Write an adapter of rank 8 for modules, each with its numbers of inputs and outputs."""
    chance = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (num_in, num_out) in modules.items():
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(8, num_in, generator=chance)
        tensors[f"{name}.lora_B.weight"] = torch.randn(num_out, 8, generator=chance)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = [module.rpartition(".")[2] for module in modules]
    described = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(described))


async def test_pictures_are_told_apart_in_every_tier(tmp_path: Path, caplog: Log) -> None:
    """Those of one size have the same token ids; what is kept of one is used for no other, and a restart knows a conversation's pictures."""
    model, first, second = folder_of(KNOWN["qwen3-vl"]), picture(1), picture(2)
    oracle = Oracle(model)
    known = {"first": b"", "second": b""}

    async def look(node: LocalNode, png: bytes, session: str, more: str = "") -> tuple[list[int], int]:
        """Return the right answer to a question about a picture, and how many tokens of its prompt were not computed."""
        reply = await node.serve(
            "chat", about(png, more=more), {}, EngineRequest(tenant="t", session_id=session, keeps_ids=True)
        )
        assert isinstance(reply, JsonReply) and reply.status == 200, reply
        body = orjson.loads(reply.body)
        said = body["choices"][0]["token_ids"]
        assert oracle.num_wrong(body["prompt_token_ids"], said, None, [png]) == 0
        known[session] = reply.token_ids or b""
        return said, body["usage"]["prompt_tokens_details"]["cached_tokens"]

    async with engine(model, tiers_in(tmp_path / "kv"), max_images=2) as node:
        assert (await look(node, first, "first"))[1] == 0
        answer, num_reused = await look(node, second, "second")
        assert num_reused == BLOCK_TOKENS, "the text before the picture"
        for _ in range(2):
            await fill_the_device(node)
            again, num_reused = await look(node, second, "second")
            assert again == answer and num_reused > 2 * BLOCK_TOKENS
        with caplog.at_level(logging.INFO, "engine_bridge"):
            for body, words in REFUSED_PICTURES.items():
                reply = await node.serve("chat", orjson.loads(body), {}, EngineRequest(tenant="t"))
                assert isinstance(reply, JsonReply) and reply.status == 400
                assert words in orjson.loads(reply.body)["error"]["message"]
        assert not any(record.exc_info for record in caplog.records)
        # Behind what looks at bodies: vLLM itself is given no address.
        with pytest.raises(InvalidRequest, match="come with the call"):
            await GivenMedia().load_from_url_async("http://127.0.0.1:9/", None)
        with pytest.raises(InvalidRequest, match="245 million pixels together"):
            check_sizes([data_uri(large(7000))] * 5, "messages")
    assert [each.num_tokens for each in seen_pictures(known["second"])] == [16]
    async with engine(model, tiers_in(tmp_path / "kv"), max_images=0) as node:
        reply = await node.serve("chat", about(first), {}, EngineRequest(tenant="t"))
        assert isinstance(reply, JsonReply) and b"reads no pictures" in reply.body
        facts = await node.run_on_engine(lambda driver: driver.engine.vllm_config.model_config)
        assert not facts.multimodal_config.enable_mm_embeds, "it is a model of text alone"
    async with engine(model, tiers_in(tmp_path / "kv")) as node:
        reports: list[AdvisoryReport] = []
        told = Advisory(advisory_id="a", tenant="t", session_id="second", token_ids=known["second"])
        await node.advise(told, reports.append)
        while not reports or reports[-1].state not in ("warm", "unknown", "expired"):
            await asyncio.sleep(0.05)
        assert (reports[-1].state, reports[-1].device_tokens) == ("warm", num_reused)
        assert (await look(node, second, "second"))[1] == num_reused


async def test_a_conversation_with_pictures_is_computed_ahead_and_goes_on(tmp_path: Path) -> None:
    """What is computed while a question is typed is that of these pictures, and their conversation keeps their names beside its token ids."""
    model, pngs = folder_of(KNOWN["qwen3-vl"]), [picture(1), picture(2), picture(3)]
    oracle = Oracle(model)
    shown = [Picture("image/png", png) for png in pngs]
    question = "Is it a ship, and if so, which one? " * 4

    async def said_rightly(node: LocalNode, messages: list[ChatMessage], num_pictures: int) -> Said:
        """What is answered, after transformers has said the same of the first pictures."""
        said = await generate(node, messages, session_id="s", tenant="t")
        assert said.prompt is not None
        ids = list(unpack_token_ids(said.prompt.token_ids))
        assert oracle.num_wrong(ids, said.token_ids, None, pngs[:num_pictures]) == 0
        assert len(seen_pictures(said.prompt.token_ids)) == num_pictures
        return said

    async with engine(model, tiers_in(tmp_path / "kv"), max_images=3) as node:
        assert node.max_images == 3
        begun = [ChatMessage("user", question, (shown[0], shown[1]))]
        other = [ChatMessage("user", question, (shown[2], shown[1]))]
        await node.prefill(request(other, tenant="t"))
        first = await said_rightly(node, begun, 2)
        assert first.num_reused < BLOCK_TOKENS, "other pictures of the same size were computed ahead"
        later = [*begun, ChatMessage("assistant", first.text)]
        ahead = await node.prefill(request([*later, ChatMessage("user", "And no")], tenant="t"))
        second = await said_rightly(node, [*later, ChatMessage("user", "And now?", (shown[2],))], 3)
        assert second.num_reused >= ahead - BLOCK_TOKENS > BLOCK_TOKENS
        fresh, long = Picture("image/png", picture(4)), ChatMessage("user", question * 5)
        with pytest.raises(InvalidRequest, match="longer than the 768 tokens"):
            await generate(node, [ChatMessage("user", question * 40, (fresh,))], tenant="t")
        last = [ChatMessage("user", question, (fresh,))]
        short = await generate(node, last, tenant="t")
        with pytest.raises(InvalidRequest, match="at most 3"):
            await generate(node, [*begun, *begun], tenant="t")
        with pytest.raises(InvalidRequest, match="damaged"):
            broken = Picture("image/png", pngs[0][:3000])
            await generate(node, [ChatMessage("user", question, (broken,))], tenant="t")
    async with engine(model, None, max_images=3, context_overflow="drop-oldest") as node:
        said = await generate(node, [long, ChatMessage("assistant", "No."), *last], tenant="t")
        assert said.prompt is not None and said.prompt.dropped == Dropped(messages=2)
        assert said.token_ids == short.token_ids, "what is left is the last question"
        with pytest.raises(InvalidRequest, match="longer than the 768 tokens"):
            await generate(node, [ChatMessage("user", question * 40)], tenant="t")


@pytest.mark.parametrize("own", [None, ""])
async def test_a_model_without_a_chat_template_chats_in_plain_words_and_says_so(
    tmp_path: Path, caplog: Log, own: str | None
) -> None:
    model = tmp_path / "model"
    shutil.copytree(nodes.small().model, model)
    for file in model.glob("chat_template*"):
        file.unlink()
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": own}))
    with caplog.at_level(logging.WARNING, "engine_bridge"):
        async with engine(model, None) as node:
            said = await generate(node, [ChatMessage("user", "Hello!")])
            assert said.prompt is not None
            prompt = node._client.renderer.get_tokenizer().decode(unpack_token_ids(said.prompt.token_ids))
            assert prompt.strip().endswith("User: Hello!\n\nAssistant:") and said.token_ids
    assert "no chat template" in caplog.text and "--chat-template" in caplog.text


def about(png: bytes, more: str = "") -> dict[str, Any]:
    """A chat completion's body with a picture behind a block of text."""
    parts = [{"type": "text", "text": "Look at this closely, and say what you see."}, as_part(png)]
    parts.append({"type": "text", "text": "Is it a ship, and if so, which one?" + more})
    asked = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": "demo", "messages": [{"role": "user", "content": parts}], **asked}


def of(part: dict[str, Any], **fields: Any) -> bytes:
    return orjson.dumps({"model": "demo", "messages": [{"role": "user", "content": [part]}], **fields})


def several(part: dict[str, Any], num: int) -> bytes:
    return orjson.dumps({"model": "demo", "messages": [{"role": "user", "content": [part] * num}]})


def large(num_pixels: int) -> bytes:
    """A PNG that says it has so many pixels in each direction, and has none."""
    size = struct.pack(">2I5B", num_pixels, num_pixels, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", size), (b"IDAT", b""))
    packed = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


REFUSED_PICTURES = {
    of(as_part(b"hello")): "Picture 1 cannot be read",
    of(as_part(picture(1)[:3000])): "damaged",
    of(as_part(large(8000))): "8,000 × 8,000 pixels; this server reads 50 million (max_image_mpixels)",
    of(as_part(large(20_000))): "too many pixels",
    of(as_part(picture(1, width=2000, height=2))): "too narrow",
    of({"type": "image_url", "image_url": {"url": "data:image/png;base64,@"}}): "no base64",
    of({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}): "not in base64",
    of({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}): "must come with its data",
    of(
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    ): "no part of the type 'video_url'",
    of({"type": "text", "text": "x", "uuid": "u", "image_embeds": "AAAA"}): "with 'image_embeds'",
    of(as_part(picture(1)), mm_processor_kwargs={"min_pixels": 10**12}): "the operator's to set",
    several(as_part(picture(1)), 3): "at most 2",
}


JUDGED = """<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {}
<Query>: {}
<Document>: {}<|im_end|>
<|im_start|>assistant
<think>\n\n</think>\n\n"""


def generating_scorer_in(folder: Path) -> Path:
    """A tiny model of the kind that Qwen3's rerankers are: one for text, whose vocabulary has "no" and "yes"."""
    tiny = folder_of(KNOWN["qwen3"])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_tokens(["no", "yes"])
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        words = tokenizer.convert_tokens_to_ids(["no", "yes"])
        model.lm_head.weight[words] = torch.randn(2, model.config.hidden_size)
    for each in (model, tokenizer):
        each.save_pretrained(folder / "Qwen3-Reranker-tiny")
    return folder / "Qwen3-Reranker-tiny"


async def test_qwen3s_reranker_reads_and_scores_as_it_was_trained_to(tmp_path: Path) -> None:
    """It comes as a model for text. vLLM would compare embeddings, and reads neither instruction nor form."""
    folder = generating_scorer_in(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).float()
    query = {
        "query": "Where is Lisbon?",
        "documents": ["Lisbon lies on a river.", "Porto, too.", "It rains."],
    }
    asked = query | {"instruction": "Find a river."}
    right = []
    for document in query["documents"]:
        ids = tokenizer.encode(JUDGED.format(asked["instruction"], query["query"], document))
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1, tokenizer.convert_tokens_to_ids(["no", "yes"])]
        right.append(logits.softmax(0)[1].item())
    config = {"kv_cache_gib": 0.125, "enable_lora": False, "engine_args": ("max_model_len=512",)}
    node = PoolingNode(EngineConfig(model=str(folder), served_model_name="scorer", **config), "rerank")
    await node.start()
    try:
        assert node.max_model_len == 512
        reply = json.loads((await node.serve("rerank", asked, {})).body)
        by_itself = json.loads((await node.serve("rerank", query, {})).body)
    finally:
        await node.close()
    found = {each["index"]: each["relevance_score"] for each in reply["results"]}
    assert max(right) - min(right) > 0.04
    np.testing.assert_allclose([found[place] for place in range(3)], right, atol=2e-3)
    assert by_itself["usage"]["prompt_tokens"] > reply["usage"]["prompt_tokens"], (
        "the model card's own instruction"
    )


async def test_why_a_model_for_embeddings_cannot_be_loaded_is_told_on_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Nothing"], "model_type": "nothing"}')
    node = PoolingNode(EngineConfig(model=str(tmp_path), served_model_name="broken"), "embeddings")
    with contextlib.suppress(Exception):
        await node.start()
    assert node.progress.state == "failed" and node.progress.error and "\n" not in node.progress.error
    await node.close()
