"""The name under which a profile of an engine is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_bridge.driver.in_process import revision_of
from engine_bridge.settings.machine import processor_name
from engine_bridge.settings.profile import ProfileSubject


def subject_of(engine: Any) -> ProfileSubject:
    """Return the subject of a built engine's profile, with its settings as resolved. On the engine's thread.

    Resolved are the type behind `auto`, and the block size that vLLM chose.
    """
    import torch

    from engine_bridge.driver.vllm_api import vllm_version

    config = engine.vllm_config
    model = config.model_config
    folder = Path(model.model)
    # The processor's name in the kernel, and the instructions that torch uses on it: virtual machines often hide the name.
    processor = f"{processor_name()} ({torch.backends.cpu.get_cpu_capability()})"
    num_ranks = config.parallel_config.world_size
    is_cuda = torch.device(config.device_config.device).type == "cuda"
    return ProfileSubject(
        model=folder.resolve().name if folder.is_dir() else model.model,
        revision=revision_of(model),
        dtype=str(model.dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name() if is_cuda else processor,
        num_threads=0 if is_cuda or num_ranks > 1 else torch.get_num_threads(),
        num_ranks=num_ranks,
        vllm_version=vllm_version(),
        block_size_tokens=config.cache_config.block_size,
    )
