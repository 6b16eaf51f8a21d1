"""The requests and replies of the HTTP routes, as data: `openapi.py` makes the OpenAPI document of it, a test compares it with the routes.

Bodies are named by the msgspec struct that reads or writes them, or, where vLLM's classes do, by the name of the call (`EngineBody`). The
descriptions are those of docs/protocol.md, in short.
"""

from __future__ import annotations

from typing import Any

from engine_bridge.protocol.node import AdapterInfo
from gateway.doors.api.conversation_routes import NewConversation
from gateway.doors.description.advice_operations import ADVICE_OPERATIONS
from gateway.doors.description.bodies import (
    AdapterChanged,
    AdapterList,
    Alive,
    ChatBatch,
    ChatModels,
    Conversation,
    ConversationDeleted,
    EngineStanding,
    InputItems,
    Invocation,
    IsSleeping,
    NotReady,
    Ready,
    ResponseDeleted,
    ServerLoad,
    Slept,
    Versions,
    Woken,
)
from gateway.doors.description.operation import (
    Body,
    EngineBody,
    Operation,
    Parameter,
    ReplyShape,
    generate,
    models,
    operate,
    query,
)
from gateway.doors.description.page_operations import EVENT_STREAM, PAGE_OPERATIONS
from gateway.doors.description.people_operations import PEOPLE_OPERATIONS
from gateway.doors.description.session_operations import SESSION_OPERATIONS
from gateway.doors.rest.engine import DEFAULT_LIMIT, MAX_LIMIT
from gateway.doors.rest.nodes import NodeChange
from gateway.nodes.node_states import NodeList, NodeStatus

_PAGE = (
    query("order", "Oldest or newest first.", enum=["asc", "desc"], default="desc"),
    query("limit", "Most items.", type="integer", minimum=1, maximum=100, default=20),
    query("after", "The `last_id` of the page before."),
)
# Stands in examples for the name of the served model.
MODEL = "MODEL"

# The ids that the store takes: gateway/sessions/text.py.
SESSION_ID_SCHEMA = {"type": "string", "minLength": 1, "maxLength": 128, "pattern": "^[!-~]+$"}
_CALL_HEADERS = tuple(
    Parameter(name, "header", description, schema)
    for name, schema, description in (
        (
            "X-Session-Id",
            SESSION_ID_SCHEMA,
            "The session that the call belongs to: it is kept as a turn there. Goes before the body's `session_id`.",
        ),
        ("X-Request-Id", {"type": "string"}, "A name for the request; replies and figures repeat it."),
        (
            "X-Agent-Name",
            {"type": "string"},
            "The agent that asks: its followers are learned and prepared for.",
        ),
        ("X-Workflow-Id", {"type": "string"}, "The run of a workflow that the call is part of."),
    )
)
_MESSAGES = [{"role": "user", "content": "Name three things to see in Lisbon."}]
_READY = {
    200: ReplyShape("They are.", Ready),
    503: ReplyShape("Not now, and how far the engine has come.", NotReady),
}


def _call(
    name: str,
    path: str,
    summary: str,
    example: dict[str, Any],
    description: str = "",
    whole: str = "",
    api: str = "",
) -> Operation:
    """Return the operation of a call that a model answers. whole: what a reply is that is never streamed. api: where it is not the name."""
    reply = ReplyShape(
        whole or "The whole answer, or with `stream` its parts as server-sent events.",
        EngineBody("reply", api or name),
        media=() if whole else (EVENT_STREAM,),
        headers=() if whole else ("X-Session-Id", "X-Overture-Session", "X-Overture-KV-Hints"),
    )
    return generate(
        f"POST {path}",
        name,
        summary,
        description,
        parameters=_CALL_HEADERS[1:2] if whole else _CALL_HEADERS,
        body=Body(EngineBody("request", api or name), example),
        replies={200: reply},
        errors=(404, 422),
    )


_SCORED_BY = (
    "The model of --rerank-model answers, else the one of --embedding-model, by how alike embeddings are."
)

OPERATIONS: tuple[Operation, ...] = (
    _call(
        "chat",
        "/v1/chat/completions",
        "Answer a conversation (OpenAI chat completions)",
        {"model": MODEL, "messages": _MESSAGES, "max_tokens": 60},
    ),
    generate(
        "POST /v1/chat/completions/batch",
        "chat_batch",
        "Answer several conversations (vLLM's chat batches)",
        "The reply has a choice for each, in their order.",
        parameters=_CALL_HEADERS[1:2],
        body=Body(ChatBatch, {"model": MODEL, "messages": [_MESSAGES], "max_tokens": 60}),
        replies={200: ReplyShape("The answers.", EngineBody("reply", "chat"))},
        errors=(404, 422),
    ),
    generate(
        "POST /invocations",
        "invocations",
        "Answer a conversation, or continue a text (SageMaker)",
        parameters=_CALL_HEADERS,
        body=Body(Invocation, {"model": MODEL, "messages": _MESSAGES, "max_tokens": 60}),
        replies={
            200: ReplyShape(
                "What `/v1/chat/completions` or `/v1/completions` answers.",
                (EngineBody("reply", "chat"), EngineBody("reply", "completions")),
                media=(EVENT_STREAM,),
            )
        },
        errors=(404, 422),
    ),
    _call(
        "completions",
        "/v1/completions",
        "Continue a text (OpenAI completions)",
        {"model": MODEL, "prompt": "Lisbon is", "max_tokens": 30},
    ),
    _call(
        "responses",
        "/v1/responses",
        "Answer an input (OpenAI responses)",
        {"model": MODEL, "input": "Name three things to see in Lisbon.", "max_output_tokens": 60},
        "`previous_response_id` goes on from a stored response, after a restart of the server, too.",
    ),
    _call(
        "input_tokens",
        "/v1/responses/input_tokens",
        "Count the tokens of an input (OpenAI responses)",
        {"model": MODEL, "input": "Name three things to see in Lisbon."},
        "Those of the conversation that `previous_response_id` or `conversation` names count, too.",
        whole="The count.",
    ),
    _call(
        "messages",
        "/v1/messages",
        "Answer a conversation (Anthropic messages)",
        {"model": MODEL, "messages": _MESSAGES, "max_tokens": 60},
    ),
    _call(
        "count_tokens",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation (Anthropic)",
        {"model": MODEL, "messages": _MESSAGES},
        whole="The count.",
    ),
    _call(
        "embeddings",
        "/v1/embeddings",
        "Embed texts or their token ids (OpenAI embeddings)",
        {"input": ["Lisbon", "Porto"]},
        "A second model answers, which the operator names with --embedding-model.",
        "An embedding of each input, in their order.",
    ),
    *(
        _call(
            "_".join(["rerank", *path.split("/")[1:-1]]),
            path,
            "Order texts by how well they answer a query (Jina's and Cohere's rerank)",
            {"query": "Where is Lisbon?", "documents": ["Lisbon lies on a river.", "Porto, too."]},
            _SCORED_BY,
            "The texts, the best first, each with its score and its place in the call.",
            "rerank",
        )
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    *(
        _call(
            "_".join(["score", *path.split("/")[1:-1]]),
            path,
            "Score pairs of texts (vLLM's scores)",
            {"text_1": "Where is Lisbon?", "text_2": ["Lisbon lies on a river.", "Porto, too."]},
            _SCORED_BY,
            "A score of each pair, in their order. A single first text is paired with each second one.",
            "score",
        )
        for path in ("/score", "/v1/score")
    ),
    generate(
        "GET /v1/responses/{id}",
        "read_response",
        "Read a stored response (OpenAI)",
        "Also one that still runs in the background. With `stream` the events of one that was begun with `background` and `stream`.",
        parameters=(
            query("stream", "Its events.", type="boolean", default=False),
            query("starting_after", "Number of the last event that was seen.", type="integer"),
        ),
        replies={200: ReplyShape("The response.", EngineBody("reply", "responses"), media=(EVENT_STREAM,))},
        errors=(400, 404, 503),
    ),
    generate(
        "DELETE /v1/responses/{id}",
        "delete_response",
        "Delete a stored response (OpenAI)",
        "Its turn goes with it, and its session if that holds nothing else. One that still runs is ended.",
        replies={200: ReplyShape("It is deleted.", ResponseDeleted)},
        errors=(404, 503),
    ),
    generate(
        "POST /v1/responses/{id}/cancel",
        "cancel_response",
        "Cancel a response in the background (OpenAI)",
        replies={200: ReplyShape("The response as it is now.", dict[str, Any])},
        errors=(400, 404, 503),
    ),
    generate(
        "GET /v1/responses/{id}/input_items",
        "list_input_items",
        "List the input of a stored response (OpenAI)",
        parameters=_PAGE,
        replies={200: ReplyShape("The items.", InputItems)},
        errors=(400, 404, 503),
    ),
    generate(
        "POST /v1/conversations",
        "create_conversation",
        "Begin a conversation (OpenAI)",
        "An empty session, to be named as `conversation` by responses.",
        body=Body(NewConversation, is_required=False),
        replies={200: ReplyShape("The conversation.", Conversation)},
        errors=(400, 429, 503),
    ),
    generate(
        "GET /v1/conversations/{id}",
        "read_conversation",
        "Read a conversation (OpenAI)",
        replies={200: ReplyShape("The conversation.", Conversation)},
        errors=(404, 503),
    ),
    generate(
        "DELETE /v1/conversations/{id}",
        "delete_conversation",
        "Delete a conversation (OpenAI)",
        replies={200: ReplyShape("It is deleted.", ConversationDeleted)},
        errors=(404, 503),
    ),
    generate(
        "GET /v1/conversations/{id}/items",
        "list_conversation_items",
        "List what was asked and answered in a conversation (OpenAI)",
        parameters=_PAGE,
        replies={200: ReplyShape("The items.", InputItems)},
        errors=(400, 404, 503),
    ),
    *SESSION_OPERATIONS,
    *ADVICE_OPERATIONS,
    *PEOPLE_OPERATIONS,
    models(
        "GET /v1/models",
        "models",
        "List what `model` may name (OpenAI)",
        replies={200: ReplyShape("The base model and the adapters.", EngineBody("reply", "models"))},
        errors=(503,),
    ),
    models(
        "GET /v1/models/{name}",
        "model",
        "Describe one model (OpenAI)",
        replies={200: ReplyShape("Its card.", EngineBody("reply", "model"))},
        errors=(404, 503),
    ),
    models(
        "GET /api/models",
        "chat_models",
        "List the models of the chat page",
        replies={200: ReplyShape("The base model, then the adapters.", ChatModels)},
    ),
    models(
        "GET /v1/adapters",
        "list_adapters",
        "List adapters and where each one is",
        replies={200: ReplyShape("The adapters.", AdapterList)},
    ),
    models(
        "POST /v1/adapters/{name}/pin",
        "pin_adapter",
        "Keep an adapter in memory",
        replies={200: ReplyShape("The adapter as it is now.", AdapterInfo)},
        errors=(400, 404, 503),
    ),
    models(
        "DELETE /v1/adapters/{name}/pin",
        "unpin_adapter",
        "Let an adapter leave memory again",
        replies={200: ReplyShape("The adapter as it is now.", AdapterInfo)},
        errors=(400, 404, 503),
    ),
    models(
        "POST /v1/load_lora_adapter",
        "load_adapter",
        "Serve an adapter",
        body=Body(
            EngineBody("request", "load_adapter"),
            {"lora_name": "pirate", "lora_path": "/models/adapters/pirate"},
        ),
        replies={200: ReplyShape("It is served.", AdapterChanged)},
        errors=(404, 503),
    ),
    models(
        "POST /v1/unload_lora_adapter",
        "unload_adapter",
        "Serve an adapter no longer",
        "Running requests finish on it.",
        body=Body(EngineBody("request", "unload_adapter"), {"lora_name": "pirate"}),
        replies={200: ReplyShape("No new request can name it.", AdapterChanged)},
        errors=(404, 503),
    ),
    operate(
        "GET /v1/engine/state",
        "engine_state",
        "See what runs, what waits and why",
        parameters=(
            query(
                "limit",
                f"Most requests of each kind; no more than {MAX_LIMIT} are given.",
                type="integer",
                minimum=0,
                maximum=999_999_999,
                default=DEFAULT_LIMIT,
            ),
        ),
        replies={200: ReplyShape("One moment between two steps.", EngineStanding)},
        errors=(400, 503),
    ),
    operate(
        "GET /v1/nodes",
        "list_nodes",
        "List nodes and what each one does",
        "Of everybody's KV and of failures only operators are told: for others these are null.",
        replies={200: ReplyShape("The nodes, in the order in which they joined.", NodeList)},
    ),
    operate(
        "POST /v1/nodes/{id}/drain",
        "drain_node",
        "Give a node no new work",
        "Running answers end there. It goes on after the reply: the list of nodes tells how far it is.",
        body=Body(NodeChange, {"timeout_s": 60}, is_required=False),
        replies={202: ReplyShape("It has begun.", NodeStatus)},
        errors=(404, 409, 503),
    ),
    operate(
        "POST /v1/nodes/{id}/restart",
        "restart_node",
        "Drain a node and start it again",
        "It goes on after the reply. The node is back when it is `ready` with another `incarnation`.",
        body=Body(NodeChange, {"timeout_s": 60}, is_required=False),
        replies={202: ReplyShape("It has begun.", NodeStatus)},
        errors=(404, 409, 503),
    ),
    operate(
        "POST /v1/nodes/{id}/reopen",
        "reopen_node",
        "Give a drained node work again",
        replies={200: ReplyShape("The node as it is now.", NodeStatus)},
        errors=(404, 409),
    ),
    operate(
        "GET /metrics",
        "metrics",
        "Figures for Prometheus",
        replies={200: ReplyShape("Its text format.", media=("text/plain",))},
    ),
    operate(
        "GET /healthz",
        "healthz",
        "Whether the process answers",
        replies={200: ReplyShape("It does.", Alive)},
        is_public=True,
    ),
    operate("GET /readyz", "readyz", "Whether requests are taken now", replies=_READY, is_public=True),
    *(
        operate(
            route,
            name,
            "Whether requests are taken now (as vLLM's server has it)",
            "As `/readyz`, for probes that are set up for `vllm serve` or for SageMaker.",
            replies=_READY,
            is_public=True,
        )
        for route, name in (("GET /health", "health"), ("GET /ping", "ping"), ("POST /ping", "ping_by_post"))
    ),
    operate(
        "GET /version",
        "version",
        "The release of vLLM, and of this server",
        replies={200: ReplyShape("Both.", Versions)},
        is_public=True,
    ),
    operate(
        "GET /load",
        "load",
        "How many requests run or wait",
        replies={200: ReplyShape("Their number.", ServerLoad)},
    ),
    operate(
        "POST /sleep",
        "sleep",
        "Free the GPU's memory for a while (vLLM)",
        "Where the server was started with --enable-sleep-mode. Requests are refused meanwhile; conversations keep their KV.",
        parameters=(
            query("mode", "`abort` ends running answers, `wait` lets them finish."),
            query("level", "1: the weights are kept in host memory."),
        ),
        replies={200: ReplyShape("The engine sleeps.", Slept)},
        errors=(400, 403, 409, 503),
    ),
    operate(
        "POST /wake_up",
        "wake_up",
        "Take the GPU's memory back (vLLM)",
        replies={200: ReplyShape("The engine is awake.", Woken)},
        errors=(400, 403, 503),
    ),
    operate(
        "GET /is_sleeping",
        "is_sleeping",
        "Whether the engine sleeps (vLLM)",
        replies={200: ReplyShape("Whether it does.", IsSleeping)},
    ),
    models(
        "POST /tokenize",
        "tokenize",
        "Split a text or a conversation into tokens",
        body=Body(EngineBody("request", "tokenize"), {"model": MODEL, "prompt": "Lisbon is"}),
        replies={200: ReplyShape("Their ids.", EngineBody("reply", "tokenize"))},
        errors=(404, 503),
    ),
    models(
        "POST /detokenize",
        "detokenize",
        "Turn tokens back into text",
        body=Body(EngineBody("request", "detokenize"), {"model": MODEL, "tokens": [5, 6, 7]}),
        replies={200: ReplyShape("The text.", EngineBody("reply", "detokenize"))},
        errors=(404, 503),
    ),
    models(
        "GET /tokenizer_info",
        "tokenizer_info",
        "The tokenizer's settings",
        "Its special tokens and the chat template among them.",
        replies={200: ReplyShape("The settings.", EngineBody("reply", "tokenizer_info"))},
        errors=(503,),
    ),
    *PAGE_OPERATIONS,
)
