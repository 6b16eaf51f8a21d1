"""Models whose KV is not that of full attention: what is reused of it gives the tokens that computing gives, or nothing is reused.

Runs before the shared engine starts (conftest), each engine after the one before it has gone.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_bridge.driver.kv.kv_tiers import KvTiers, TiersConfig
from engine_bridge.local_node import LocalNode, LocalNodeConfig
from engine_bridge.protocol.engine_request import EngineRequest, RequestId, Sampling
from engine_bridge.protocol.node import Advisory, AdvisoryReport, Delta, KvSources
from engine_bridge.settings.engine_config import EngineConfig
from gateway.settings.config import DEMO_ADAPTERS_DIR, DEMO_MODEL_DIR

from .nodes import WaitsForTheDisk

BLOCK_TOKENS, WINDOW_TOKENS, NUM_DEVICE_BLOCKS = 32, 64, 60
ANSWER_TOKENS = 12
SIZES: dict[str, Any] = {
    "vocab_size": 1280,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_ids = itertools.count()


def make_model(folder: Path, family: str) -> Path:
    """A checkpoint of random weights with enough spread that each token of a prompt matters, and the demo model's tokenizer."""
    import torch
    import transformers

    configs: dict[str, Any] = {
        "sliding": lambda: transformers.MistralConfig(
            **SIZES, num_key_value_heads=2, head_dim=32, sliding_window=WINDOW_TOKENS
        ),
        "latent": lambda: transformers.DeepseekV3Config(
            **SIZES, q_lora_rank=32, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=64, v_head_dim=64,
            n_routed_experts=8, n_group=2, topk_group=1, first_k_dense_replace=2,
        ),
        "two kinds": lambda: transformers.Gemma3TextConfig(
            **SIZES, num_key_value_heads=2, head_dim=32, sliding_window=WINDOW_TOKENS, query_pre_attn_scalar=32,
            layer_types=["sliding_attention", "full_attention"] * (SIZES["num_hidden_layers"] // 2),
        ),
        "experts": lambda: transformers.Qwen3MoeConfig(
            **SIZES, num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        ),
        "recurrent": lambda: transformers.GraniteMoeHybridConfig(
            **SIZES, num_key_value_heads=2, layer_types=["mamba", "attention"], num_local_experts=0, num_experts_per_tok=0,
            shared_intermediate_size=64, mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=1, mamba_d_state=32, mamba_expand=2,
            mamba_chunk_size=256, position_embedding_type="nope",
        ),
        "without adapters": lambda: transformers.StableLmConfig(**SIZES, num_key_value_heads=2),
    }  # fmt: skip
    config = configs[family]()
    chance = torch.Generator().manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() == 2:
                weights.normal_(0, 1.2 / weights.shape[-1] ** 0.5, generator=chance)
    model.save_pretrained(folder)
    if family == "latent":
        described = json.loads((folder / "config.json").read_text())
        described |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
        (folder / "config.json").write_text(json.dumps(described))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL_DIR / name, folder / name)
    return folder


def write_adapter(folder: Path, model: Path, merged: Path, names: Sequence[str]) -> None:
    """Write a LoRA adapter on the linear modules of these names, and the model whose weights it is merged into."""
    import torch
    import transformers

    rank, chance = 4, torch.Generator().manual_seed(2)
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tensors = {}
    with torch.no_grad():
        for path, weights in whole.named_parameters():
            module = path.removesuffix(".weight")
            if module.rpartition(".")[2] in names:
                down = torch.randn(rank, weights.shape[1], generator=chance) / weights.shape[1] ** 0.5
                up = torch.randn(weights.shape[0], rank, generator=chance) / rank**0.5
                weights += up @ down
                tensors[f"base_model.model.{module}.lora_A.weight"] = down
                tensors[f"base_model.model.{module}.lora_B.weight"] = up
    whole.save_pretrained(merged)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL_DIR / name, merged / name)
    save_adapter(folder, tensors, rank, names)


def save_adapter(folder: Path, tensors: dict[str, Any], rank: int, names: Sequence[str]) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(names),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


@asynccontextmanager
async def engine(model: Path, tiers: KvTiers | None, **changes: Any) -> AsyncIterator[LocalNode]:
    config = EngineConfig(
        model=str(model),
        served_model_name="tiny",
        dtype="float32",
        max_model_len=768,
        num_kv_blocks=NUM_DEVICE_BLOCKS,
        **{"cpu_threads": 1, "max_num_seqs": 4, "enable_lora": False} | changes,
    )
    node = LocalNode(LocalNodeConfig(engine=config), tiers)
    await node.start()
    try:
        yield node
    finally:
        await node.close()


def tiers_in(folder: Path) -> KvTiers:
    return KvTiers(
        TiersConfig(host_bytes=64 << 20, disk_bytes=256 << 20, folder=folder), policy=WaitsForTheDisk()
    )


def text(seed: object, num_tokens: int) -> list[int]:
    chance = random.Random(repr(seed))
    return [chance.randrange(20, 900) for _ in range(num_tokens)]


def request(
    prompt: Sequence[int],
    session: str = "",
    tenant: str = "",
    num_tokens: int = ANSWER_TOKENS,
    adapter: str = "",
) -> EngineRequest:
    return EngineRequest(
        adapter=adapter,
        request_id=RequestId(f"r{next(_ids)}"),
        prompt_token_ids=tuple(prompt),
        session_id=session,
        tenant=tenant,
        sampling=Sampling(temperature=0, max_tokens=num_tokens, ignore_eos=True),
    )


async def answer(node: LocalNode, prompt: Sequence[int], **asked: Any) -> tuple[list[int], KvSources]:
    tokens: list[int] = []
    last: Delta | None = None
    async for last in node.generate(request(prompt, **asked)):
        tokens.extend(last.token_ids)
    assert last is not None and last.timings is not None
    return tokens, last.timings.kv


async def computed(node: LocalNode, prompt: Sequence[int]) -> list[int]:
    """What is answered where nothing can be reused: to somebody who has never asked before."""
    tokens, kv = await answer(node, prompt, tenant=f"newcomer-{next(_ids)}")
    assert kv.recomputed == len(prompt)
    return tokens


async def fill_the_device(node: LocalNode) -> None:
    """With what nobody asks for again. All at once, so that none lives on the blocks that another's window has left."""
    others = [text(next(_ids), 600) for _ in range(4)]
    await asyncio.gather(
        *(answer(node, other, tenant=f"other-{next(_ids)}", num_tokens=1) for other in others)
    )


def num_reused(kv: KvSources) -> int:
    return kv.device + kv.host + kv.disk


async def test_where_every_layer_has_a_window_what_is_reused_is_what_was_computed(tmp_path: Path) -> None:
    """Also what was computed ahead, which the device has in part, what comes back after a restart, and nothing of another RoPE."""
    model, folder = make_model(tmp_path / "model", "sliding"), tmp_path / "kv"
    system = text("system", 230)
    long = system + text("ahead", 200)
    prompts = [system + text(at, 90) for at in range(2)] + [long]
    async with engine(model, tiers_in(folder)) as node:
        # Nobody has asked for it yet, so the tiers have nothing of it, and the device by and by only what is in the window.
        for end in range(4 * BLOCK_TOKENS, len(long), 4 * BLOCK_TOKENS):
            await node.prefill(request(long[:end], session="s"))
        right = [await computed(node, prompt) for prompt in prompts]
        assert (await answer(node, long, session="s"))[0] == right[-1]
        assert await reused_rightly(node, prompts, right)
        assert await node.run_on_engine(null_block_is_untouched)
    async with engine(model, tiers_in(folder), max_num_seqs=3) as node:
        assert await reused_rightly(node, prompts, right)
    overrides = 'hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}'
    async with engine(model, tiers_in(folder), engine_args=(overrides,)) as node:
        tokens, kv = await answer(node, long, session="s")
        assert num_reused(kv) == 0, "it is another model's KV"
        assert tokens == await computed(node, long) != right[-1]


async def reused_rightly(
    node: LocalNode, prompts: Sequence[list[int]], right: Sequence[list[int]], **asked: Any
) -> int:
    """How many tokens of prompts were not computed, the device having been filled with others' before each."""
    num_tokens = 0
    for number in range(2 * len(prompts)):
        await fill_the_device(node)
        which = number % len(prompts)
        tokens, kv = await answer(node, prompts[which], session=f"s{which}", **asked)
        assert tokens == right[which], kv
        num_tokens += num_reused(kv)
    return num_tokens


def null_block_is_untouched(driver: Any) -> bool:
    from engine_bridge.driver.in_process import kv_caches_of

    return not any(layer[0].any() for layer in kv_caches_of(driver.engine))


async def test_where_vllm_reuses_no_kv_neither_does_this_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, folder = make_model(tmp_path / "model", "latent"), tmp_path / "kv"
    prompt = text("prompt", 300)
    reports: list[AdvisoryReport] = []
    with caplog.at_level(logging.WARNING, "engine_bridge.driver.kv.kv_tiers"):
        async with engine(model, tiers_in(folder)) as node:
            first, second = [await answer(node, prompt, session="s") for _ in range(2)]
            assert first[0] == second[0] and second[1].recomputed == len(prompt)
            assert await node.prefill(request(prompt, session="s")) == 0
            await node.advise(Advisory(advisory_id="a", session_id="s"), reports.append)
            assert node.figures().kv_tiers is None and node.peer_address == ""
            node.end_session("", "s")
            await answer(node, prompt)  # behind the report on the engine's thread
    assert [report.state for report in reports] == ["unknown"]
    assert [record.message for record in caplog.records if "KV tiers are off" in record.message] == [
        "the KV tiers are off: vLLM computes every prompt of this model anew here (its prefix caching is off)"
    ]
    assert not folder.exists()
    async with engine(model, None) as node:
        assert (await answer(node, prompt))[0] == first[0]


async def test_a_server_starts_without_what_its_model_cannot_have_and_says_so(tmp_path: Path) -> None:
    """What it has all the same gives the tokens of an engine that was asked for nothing else."""
    prompts = [text(at, 300) for at in range(3)]
    lacks = {
        "two kinds": ["hybrid KV cache"],
        "recurrent": ["KV tiers", "prefix caching"],  # a kernel of vLLM's fails with it on a CPU
        "without adapters": ["adapters"],
    }
    for family, mechanisms in lacks.items():
        model = make_model(tmp_path / family, family)
        # Two threads, where others have one: matrix products that vLLM keeps are right for one number only.
        async with engine(model, None, cpu_threads=2) as node:
            right = [await computed(node, prompt) for prompt in prompts]
        async with engine(model, tiers_in(tmp_path / f"{family}, kv"), enable_lora=True) as node:
            assert [each.mechanism for each in node.figures().left_out] == mechanisms
            num_reused = await reused_rightly(node, prompts, right)
            assert num_reused > 3 * 200 if "KV tiers" not in mechanisms else num_reused == 0
            pirate = {"lora_name": "pirate", "lora_path": str(DEMO_ADAPTERS_DIR / "pirate")}
            refused = await node.load_adapter(pirate)
            assert refused.status == 400, "it fits none of these models"
            assert (b"this server runs without adapters" in refused.body) == ("adapters" in mechanisms)


async def test_beside_experts_adapters_change_what_their_merged_weights_change(tmp_path: Path) -> None:
    import torch

    model, merged, adapter = (tmp_path / name for name in ("model", "merged", "adapter"))
    make_model(model, "experts")
    write_adapter(adapter, model, merged, "q_proj k_proj v_proj o_proj".split())
    expert = "base_model.model.model.layers.0.mlp.experts.0.up_proj"
    halves = {f"{expert}.lora_A.weight": torch.ones(4, 64), f"{expert}.lora_B.weight": torch.ones(64, 4)}
    save_adapter(tmp_path / "on experts", halves, 4, ["up_proj"])
    prompts = [text(at, 300) for at in range(3)]
    async with engine(merged, None) as node:
        right = [await computed(node, prompt) for prompt in prompts]
    async with engine(model, tiers_in(tmp_path / "kv"), enable_lora=True) as node:
        assert not node.figures().left_out
        loaded = await node.load_adapter({"lora_name": "tuned", "lora_path": str(adapter)})
        assert loaded.status == 200, loaded.body
        refused = await node.load_adapter({"lora_name": "odd", "lora_path": str(tmp_path / "on experts")})
        assert refused.status == 400 and b"experts.0.up_proj" in refused.body
        for prompt, tuned in zip(prompts, right, strict=True):
            base = await computed(node, prompt)
            assert (await answer(node, prompt, adapter="tuned"))[0] == tuned != base
        assert await reused_rightly(node, prompts, right, adapter="tuned") > 3 * 200
