"""LangGraph: callbacks on a compiled graph. Its nodes are the agents, its edges those of the call graph.

A node's own chain starts before its prompt is made, so this is earlier than `on_chat_model_start`; the graph's edges tell earlier still.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from uuid import UUID

from overture_client.advisor import Advisor
from overture_client.hooks.naming import add_to_requests, same_server

_NAMES = "overture"


def attach(app: Any, advisor: Advisor) -> Any:
    """Return the compiled graph `app` with callbacks that advise as it runs. One run at a time for each advisor.

    Requests to the gateway from within a node carry the node's session (`advisor.headers`), whichever client of httpx sends them.
    """
    from langchain_core.callbacks import BaseCallbackHandler

    add_to_requests(_headers_of_node)

    drawn = app.get_graph()
    nodes = {name for name in drawn.nodes if not name.startswith("__")}
    for edge in drawn.edges:
        if edge.source in nodes and edge.target in nodes:
            advisor.graph.add_edge(edge.source, edge.target)

    class OvertureCallbacks(BaseCallbackHandler):
        """Tells the advisor which nodes start and end."""

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
            """Note that a node begins."""
            node: Any = (metadata or {}).get("langgraph_node")
            # Whatever runs inside of a node carries the node's name too; only the node itself is called by it.
            if node in nodes and more.get("name") == node:
                self._running[run_id] = node
                advisor.agent_started(node)

        def on_chain_end(self, outputs: Any, *, run_id: UUID, **more: Any) -> None:
            """Note that a node has ended."""
            if run_id in self._running:
                advisor.agent_ended(self._running.pop(run_id))

        def on_chain_error(self, error: BaseException, *, run_id: UUID, **more: Any) -> None:
            """Note that a node has failed."""
            if run_id in self._running:
                advisor.agent_failed(self._running.pop(run_id))

    return app.with_config(
        callbacks=[OvertureCallbacks()], configurable={_NAMES: _Names(advisor, frozenset(nodes))}
    )


class _Names(NamedTuple):
    """The part of a run's configuration that names the nodes' sessions in requests from within them."""

    advisor: Advisor
    nodes: frozenset[str]


def _headers_of_node(url: str) -> dict[str, str]:
    """Return the headers of the node in which this is called, for a request to its advisor's gateway."""
    from langgraph.config import get_config

    try:
        config = get_config()
    except RuntimeError:  # not within a graph
        return {}
    names: _Names | None = config.get("configurable", {}).get(_NAMES)
    if names is None or not same_server(url, names.advisor.client.base_url):
        return {}
    # A node may be a graph itself: then its nodes follow its name, as in `writer:ID|inner:ID`.
    place = str(config.get("metadata", {}).get("langgraph_checkpoint_ns", ""))
    node = place.partition("|")[0].partition(":")[0]
    return names.advisor.headers(node) if node in names.nodes else {}
