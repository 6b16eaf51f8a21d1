"""vLLM's pooling engine, as the engine thread drives it."""

from __future__ import annotations

from typing import Any

from engine_bridge.driver.apis.chat_template import fault_of
from engine_bridge.driver.engine.building import engine_args, load_vllm
from engine_bridge.driver.engine.model_facts import configuration_of
from engine_bridge.driver.pooling.rerankers import score_template
from engine_bridge.policy.limits.model_support import UnusableModel
from engine_bridge.protocol.node import Api
from engine_bridge.settings.engine_config import EngineConfig


class PoolingDriver:
    """An engine that makes an embedding or a score of each prompt: a `Driver` of `EngineThread`. Build and use it on one thread.

    Args:
        config: of the engine.
        api: what the model is for, `embeddings` or `rerank`.

    Raises UnusableModel for a model that does not do that and for a template that is none; errors of vLLM pass unchanged.
    """

    def __init__(self, config: EngineConfig, api: Api) -> None:
        engine_class: Any = load_vllm()
        from engine_bridge.driver.vllm_api import UsageContext

        if config.chat_template and (fault := fault_of(config.chat_template)):
            raise UnusableModel(f"--rerank-chat-template: the file is no Jinja template: {fault}")
        args, served = pooling_args(config), UsageContext.OPENAI_API_SERVER
        described = configuration_of(args)  # refuses an unfit model in one sentence
        self.chat_template = config.chat_template
        if api == "rerank":
            self.chat_template = score_template(args, described, config.chat_template)
        self.engine = engine_class.from_engine_args(args, usage_context=served, enable_multiprocessing=False)
        self._internal_ids: dict[str, str] = {}
        self.tasks: tuple[str, ...] = self.engine.get_supported_tasks()
        can = "embed" in self.tasks if api == "embeddings" else can_score(self.engine, self.tasks)
        if not can:
            does_not = "makes no embeddings" if api == "embeddings" else "scores no texts"
            raise UnusableModel(f"it {does_not}: vLLM can use it for {', '.join(self.tasks)}")

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
        """Return whether any prompt has no output yet."""
        return bool(self._internal_ids)

    def step(self) -> list[Any]:
        """Run one step and return the outputs that it has finished."""
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
        """Return False: a step without an output has computed a part of one."""
        return False

    def close(self) -> None:
        """End the engine."""
        self.engine.engine_core.shutdown()


def can_score(engine: Any, tasks: tuple[str, ...]) -> bool:
    """Return whether vLLM scores texts by an engine's model: a model for that, with one label, or one that makes embeddings, by their likeness."""
    from engine_bridge.driver.vllm_api import enable_scoring_api

    return bool(enable_scoring_api(tasks, engine.model_config))


def pooling_args(config: EngineConfig) -> Any:
    """Return vLLM's arguments for a model that makes embeddings or scores."""
    args = engine_args(config, None)
    args.runner = "pooling"
    # vLLM's own scheduler, by priority: a tenant's first input goes before another's thousandth (`PoolingClient.encode`).
    args.scheduler_cls, args.scheduling_policy = None, "priority"
    return args
