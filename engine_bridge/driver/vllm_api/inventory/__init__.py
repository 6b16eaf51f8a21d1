"""Every name of vLLM's that this project uses, as data, by area. Nothing here imports vllm: `vllm_api.check` says what of it has moved.

Source: vLLM 0.32.
"""

from engine_bridge.driver.vllm_api.inventory import bench, engine, grammars, kv, lora, scheduling, serving

# What an engine needs, and what the APIs before it need.
ENGINE_SIDE = (*engine.OWNERS, *scheduling.OWNERS, *kv.OWNERS, *lora.OWNERS, *grammars.OWNERS)
SERVING_SIDE = serving.OWNERS
ALL = (*ENGINE_SIDE, *SERVING_SIDE, *bench.OWNERS)
