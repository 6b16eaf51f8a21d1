"""LangGraph: callbacks on a compiled graph. Its nodes are the agents, its edges those of the call graph.

A node's own chain starts before its prompt is made, so this is earlier than `on_chat_model_start`; what the graph's edges say is earlier still.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from gateway.client.advisor import Advisor


def attach(app: Any, advisor: Advisor) -> Any:
    """The compiled graph `app`, advising as it runs. One run at a time for each advisor.

    A node names its session itself: ``llm.bind(extra_headers=advisor.headers("node"))``.
    """
    from langchain_core.callbacks import BaseCallbackHandler

    drawn = app.get_graph()
    nodes = {name for name in drawn.nodes if not name.startswith("__")}
    for edge in drawn.edges:
        if edge.source in nodes and edge.target in nodes:
            advisor.graph.add_edge(edge.source, edge.target)

    class OvertureCallbacks(BaseCallbackHandler):
        # In the caller's thread, also in async graphs: it only notes and enqueues, and order matters.
        run_inline = True

        def __init__(self) -> None:
            self._running: dict[UUID, str] = {}

        def on_chain_start(
            self,
            serialized: Any,
            inputs: Any,
            *,
            run_id: UUID,
            metadata: dict[str, Any] | None = None,
            **more: Any,
        ) -> None:
            node: Any = (metadata or {}).get("langgraph_node")
            # Whatever runs inside of a node carries the node's name too; only the node itself is called by it.
            if node in nodes and more.get("name") == node:
                self._running[run_id] = node
                advisor.agent_started(node)

        def on_chain_end(self, outputs: Any, *, run_id: UUID, **more: Any) -> None:
            if run_id in self._running:
                advisor.agent_ended(self._running.pop(run_id))

        def on_chain_error(self, error: BaseException, *, run_id: UUID, **more: Any) -> None:
            if run_id in self._running:
                advisor.agent_failed(self._running.pop(run_id))

    return app.with_config(callbacks=[OvertureCallbacks()])
