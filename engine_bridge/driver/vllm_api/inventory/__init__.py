"""Every name of vLLM's that this project uses, as data, by area. Nothing here imports vllm: `vllm_api.check` finds the names that have moved.

Source: vLLM 0.32.
"""

from engine_bridge.driver.vllm_api.inventory import bench, engine, grammars, kv, lora, scheduling, serving

# The names that an engine needs, and the names that the APIs in front of it need.
ENGINE_SIDE = (*engine.OWNERS, *scheduling.OWNERS, *kv.OWNERS, *lora.OWNERS, *grammars.OWNERS)
SERVING_SIDE = serving.OWNERS
ALL = (*ENGINE_SIDE, *SERVING_SIDE, *bench.OWNERS)
