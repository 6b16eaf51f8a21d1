"""vLLM's pooling engine, as the engine thread drives it."""

from __future__ import annotations

from typing import Any

from engine_bridge.driver.engine.building import engine_args, load_vllm
from engine_bridge.driver.engine.model_facts import configuration_of
from engine_bridge.policy.limits.model_support import UnusableModel
from engine_bridge.settings.engine_config import WHATEVER_FITS, EngineConfig


class EmbeddingDriver:
    """An engine that makes an embedding of each prompt: a `Driver` of `EngineThread`. Build and use it on one thread.

    Raises UnusableModel for a model that makes no embeddings; errors of vLLM pass unchanged.
    """

    def __init__(self, config: EngineConfig) -> None:
        engine_class: Any = load_vllm()
        from engine_bridge.driver.vllm_api import UsageContext

        args, served = pooling_args(config), UsageContext.OPENAI_API_SERVER
        configuration_of(args)  # refuses an unfit model in one sentence
        self.engine = engine_class.from_engine_args(args, usage_context=served, enable_multiprocessing=False)
        self._internal_ids: dict[str, str] = {}
        tasks = self.engine.get_supported_tasks()
        if "embed" not in tasks:
            raise UnusableModel(f"it makes no embeddings: vLLM can use it for {', '.join(tasks)}")

    def add(self, request_id: str, prompt: Any, params: Any, priority: int) -> None:
        """Queue a prompt under an id that is used once; lower priorities start first. Raises vLLM's errors for a prompt that it refuses."""
        self._internal_ids[request_id] = self.engine.add_request(
            request_id, prompt, params, priority=priority
        )

    def abort(self, request_id: str) -> None:
        """Drop a prompt; unknown and finished ids are no error."""
        internal_id = self._internal_ids.pop(request_id, None)
        if internal_id is not None:
            self.engine.abort_request([internal_id], internal=True)

    def has_work(self) -> bool:
        """Return whether any prompt has no embedding yet."""
        return bool(self._internal_ids)

    def step(self) -> list[Any]:
        """Run one step and return the embeddings that it has finished."""
        outputs = [output for output in self.engine.step() if output.finished]
        for output in outputs:
            self._internal_ids.pop(output.request_id, None)
        return outputs

    def is_urgent(self, outputs: list[Any]) -> bool:
        """Return True: each output is the only one of its prompt."""
        return True

    def wait_s(self) -> float | None:
        """Return None: without prompts there is nothing to do."""
        return None

    def is_stuck(self) -> bool:
        """Return False: a step without an embedding has computed a part of one."""
        return False

    def close(self) -> None:
        """End the engine."""
        self.engine.engine_core.shutdown()


def pooling_args(config: EngineConfig) -> Any:
    """Return vLLM's arguments for an embedding model."""
    args = engine_args(config, None)
    args.runner, args.max_model_len = "pooling", WHATEVER_FITS
    # vLLM's own scheduler, by priority: a tenant's first input goes before another's thousandth (`EmbeddingClient.encode`).
    args.scheduler_cls, args.scheduling_policy = None, "priority"
    return args
