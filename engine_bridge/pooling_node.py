"""A model for embeddings or scores as a node: the part of the `Node` protocol that a gateway asks of it. Importing this module imports no vllm."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from engine_bridge.bridge import EngineThread
from engine_bridge.policy.limits.model_support import UnusableModel
from engine_bridge.protocol.engine_request import ANONYMOUS, EngineRequest
from engine_bridge.protocol.errors import EngineUnavailable
from engine_bridge.protocol.figures import NodeFigures, Progress
from engine_bridge.protocol.node import AdapterInfo, Api, JsonReply
from engine_bridge.settings.engine_config import EngineConfig

if TYPE_CHECKING:
    from engine_bridge.driver.pooling.engine import PoolingDriver
    from engine_bridge.driver.pooling.serving import PoolingClient, PoolingServing


class PoolingNode:
    """A model for embeddings or scores in this process. For what each method promises see `engine_bridge.protocol.node.Node`.

    Args:
        config: of its engine.
        api: what the model is for, `embeddings` or `rerank`.
    """

    def __init__(self, config: EngineConfig, api: Api) -> None:
        self._config, self._api = config, api
        self._began_s = time.monotonic()
        self._client: PoolingClient | None = None
        self._serving: PoolingServing | None = None
        self._error: str | None = None
        self._thread: EngineThread[PoolingDriver] = EngineThread(
            self._make_driver,
            lambda outputs: self._client.take(outputs) if self._client is not None else None,
            lambda error: self._client.fail_all() if self._client is not None else None,
        )

    def _make_driver(self) -> PoolingDriver:
        from engine_bridge.driver.pooling.engine import PoolingDriver

        return PoolingDriver(self._config, self._api)

    async def start(self) -> None:
        """Bring the model up. Raises what stopped it, unless a sentence says all of it: `progress` has that."""
        try:
            await self._thread.start()
            driver = await self._thread.call(lambda driver: driver)
            from engine_bridge.driver.pooling.serving import PoolingClient, PoolingServing

            self._client = PoolingClient(self._thread, driver.engine)
            names = self._config.served_model_name, self._config.model
            self._serving = PoolingServing(self._client, driver.tasks, *names, driver.chat_template)
        except UnusableModel as error:
            self._error = " ".join(str(error).split())
        except Exception as error:
            self._error = " ".join(f"{type(error).__name__}: {error}".split())
            raise

    async def serve(
        self, api: Api, body: object, headers: Mapping[str, str], request: EngineRequest = ANONYMOUS
    ) -> JsonReply:
        """Answer a call for embeddings, or for scores as `rerank` or `score`. Raises EngineUnavailable until the model is up."""
        if self._serving is None or self._thread.state != "ready":
            raise EngineUnavailable(f"the model is {self.progress.state}", code="starting")
        return await self._serving.serve(api, body, headers, request.tenant)

    @property
    def progress(self) -> Progress:
        """How far the model has come on its way to `ready`."""
        state = self._thread.state
        if self._error is not None:
            state = "failed"
        elif state == "ready" and self._serving is None:
            state = "starting"
        error = self._error or (str(self._thread.error) if self._thread.error is not None else None)
        return Progress(state, "loading the model", time.monotonic() - self._began_s, error)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The name that clients use."""
        return self._config.model_names

    @property
    def max_model_len(self) -> int:
        """The longest input in tokens; 0 until the model is up."""
        return self._client.model_config.max_model_len if self._client is not None else 0

    @property
    def max_images(self) -> int:
        """No picture: texts and token ids are read."""
        return 0

    @property
    def can_use_tools(self) -> bool:
        """No call: nothing is generated."""
        return False

    def figures(self) -> NodeFigures:
        """Return how often the engine was rebuilt."""
        return NodeFigures(num_steps=self._thread.num_steps, num_rebuilds=self._thread.num_rebuilds)

    def adapters(self) -> list[AdapterInfo]:
        """Return no adapters."""
        return []

    async def drain(self, timeout_s: float) -> bool:
        """Return at once: the gateway waits for its own calls."""
        return True

    async def close(self) -> None:
        """End the engine. An engine still being built ends with the process."""
        if not self._thread.close_later(lambda: None):
            await self._thread.close()
