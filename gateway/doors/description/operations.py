"""The requests and replies of the HTTP routes, as data: `openapi.py` makes the OpenAPI document of it, a test compares it with the routes.

Bodies are named by the msgspec struct that reads or writes them, or, where vLLM's classes do, by the name of the call (`EngineBody`). The
descriptions are those of docs/protocol.md, in short.
"""

from __future__ import annotations

from typing import Any, Literal

from engine_bridge.protocol.node import AdapterInfo
from gateway.doors.description.advice_operations import ADVICE_OPERATIONS
from gateway.doors.description.bodies import (
    AdapterChanged,
    AdapterList,
    Alive,
    ChatBatch,
    ChatModels,
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
    GENERATE,
    MODELS,
    OPERATE,
    Body,
    EngineBody,
    Operation,
    Parameter,
    ReplyShape,
)
from gateway.doors.description.page_operations import EVENT_STREAM, PAGE_OPERATIONS
from gateway.doors.description.people_operations import PEOPLE_OPERATIONS
from gateway.doors.description.session_operations import SESSION_OPERATIONS
from gateway.doors.rest.engine import DEFAULT_LIMIT, MAX_LIMIT
from gateway.doors.rest.nodes import NodeChange
from gateway.nodes.node_states import NodeList, NodeStatus

# Stands in examples for the name of the served model.
MODEL = "MODEL"

# The ids that the store takes: gateway/sessions/text.py.
SESSION_ID_SCHEMA = {"type": "string", "minLength": 1, "maxLength": 128, "pattern": "^[!-~]+$"}
_TEXT = {"type": "string"}
_RESPONSE = Parameter("id", "path", _TEXT, "The response's id.")
_NODE = Parameter("id", "path", _TEXT, "The node's id, as the list of nodes gives it.")
_ADAPTER = Parameter("name", "path", _TEXT, "The adapter's name.")
_CALL_HEADERS = (
    Parameter(
        "X-Session-Id",
        "header",
        SESSION_ID_SCHEMA,
        "The session that the call belongs to: it is kept as a turn there. Goes before the body's `session_id`.",
    ),
    Parameter("X-Request-Id", "header", _TEXT, "A name for the request; replies and figures repeat it."),
    Parameter(
        "X-Agent-Name", "header", _TEXT, "The agent that asks: its followers are learned and prepared for."
    ),
    Parameter("X-Workflow-Id", "header", _TEXT, "The run of a workflow that the call is part of."),
)
_MESSAGES = [{"role": "user", "content": "Name three things to see in Lisbon."}]
_PROBES: tuple[tuple[Literal["get", "post"], str, str], ...] = (
    ("get", "/health", "health"),
    ("get", "/ping", "ping"),
    ("post", "/ping", "ping_by_post"),
)


def _call(
    name: str, path: str, summary: str, example: dict[str, Any], description: str = "", whole: str = ""
) -> Operation:
    """Return the operation of a call that a model answers. whole: what a reply is that is never streamed."""
    reply = ReplyShape(
        description=whole or "The whole answer, or with `stream` its parts as server-sent events.",
        shape=EngineBody("reply", name),
        media=() if whole else (EVENT_STREAM,),
        headers=() if whole else ("X-Session-Id", "X-Overture-Session", "X-Overture-KV-Hints"),
    )
    return Operation(
        "post",
        path,
        name,
        GENERATE,
        summary,
        description,
        parameters=_CALL_HEADERS[1:2] if whole else _CALL_HEADERS,
        body=Body(shape=EngineBody("request", name), example=example),
        replies={200: reply},
        errors=(404, 422),
    )


OPERATIONS: tuple[Operation, ...] = (
    _call(
        "chat",
        "/v1/chat/completions",
        "Answer a conversation (OpenAI chat completions)",
        {"model": MODEL, "messages": _MESSAGES, "max_tokens": 60},
    ),
    Operation(
        "post",
        "/v1/chat/completions/batch",
        "chat_batch",
        GENERATE,
        "Answer several conversations (vLLM's chat batches)",
        "The reply has a choice for each, in their order.",
        parameters=_CALL_HEADERS[1:2],
        body=Body(shape=ChatBatch, example={"model": MODEL, "messages": [_MESSAGES], "max_tokens": 60}),
        replies={200: ReplyShape(description="The answers.", shape=EngineBody("reply", "chat"))},
        errors=(404, 422),
    ),
    Operation(
        "post",
        "/invocations",
        "invocations",
        GENERATE,
        "Answer a conversation, or continue a text (SageMaker)",
        parameters=_CALL_HEADERS,
        body=Body(shape=Invocation, example={"model": MODEL, "messages": _MESSAGES, "max_tokens": 60}),
        replies={
            200: ReplyShape(
                description="What `/v1/chat/completions` or `/v1/completions` answers.",
                shape=(EngineBody("reply", "chat"), EngineBody("reply", "completions")),
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
    Operation(
        "get",
        "/v1/responses/{id}",
        "read_response",
        GENERATE,
        "Read a stored response (OpenAI)",
        "Also one that still runs in the background. With `stream` the events of one that was begun with `background` and `stream`.",
        parameters=(
            _RESPONSE,
            Parameter("stream", "query", {"type": "boolean", "default": False}, "Its events."),
            Parameter(
                "starting_after", "query", {"type": "integer"}, "Number of the last event that was seen."
            ),
        ),
        replies={
            200: ReplyShape(
                description="The response.", shape=EngineBody("reply", "responses"), media=(EVENT_STREAM,)
            )
        },
        errors=(400, 404, 503),
    ),
    Operation(
        "delete",
        "/v1/responses/{id}",
        "delete_response",
        GENERATE,
        "Delete a stored response (OpenAI)",
        "Its turn goes with it, and its session if that holds nothing else. One that still runs is ended.",
        parameters=(_RESPONSE,),
        replies={200: ReplyShape(description="It is deleted.", shape=ResponseDeleted)},
        errors=(404, 503),
    ),
    Operation(
        "post",
        "/v1/responses/{id}/cancel",
        "cancel_response",
        GENERATE,
        "Cancel a response in the background (OpenAI)",
        parameters=(_RESPONSE,),
        replies={200: ReplyShape(description="The response as it is now.", shape=dict[str, Any])},
        errors=(400, 404, 503),
    ),
    Operation(
        "get",
        "/v1/responses/{id}/input_items",
        "list_input_items",
        GENERATE,
        "List the input of a stored response (OpenAI)",
        parameters=(
            _RESPONSE,
            Parameter(
                "order", "query", {"enum": ["asc", "desc"], "default": "desc"}, "Oldest or newest first."
            ),
            Parameter(
                "limit",
                "query",
                {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
                "Most items.",
            ),
            Parameter("after", "query", _TEXT, "The `last_id` of the page before."),
        ),
        replies={200: ReplyShape(description="The items.", shape=InputItems)},
        errors=(400, 404, 503),
    ),
    *SESSION_OPERATIONS,
    *ADVICE_OPERATIONS,
    *PEOPLE_OPERATIONS,
    Operation(
        "get",
        "/v1/models",
        "models",
        MODELS,
        "List what `model` may name (OpenAI)",
        replies={
            200: ReplyShape(
                description="The base model and the adapters.", shape=EngineBody("reply", "models")
            )
        },
        errors=(503,),
    ),
    Operation(
        "get",
        "/v1/models/{name}",
        "model",
        MODELS,
        "Describe one model (OpenAI)",
        parameters=(Parameter("name", "path", _TEXT, "The model's or adapter's name."),),
        replies={200: ReplyShape(description="Its card.", shape=EngineBody("reply", "model"))},
        errors=(404, 503),
    ),
    Operation(
        "get",
        "/api/models",
        "chat_models",
        MODELS,
        "List the models of the chat page",
        replies={200: ReplyShape(description="The base model, then the adapters.", shape=ChatModels)},
    ),
    Operation(
        "get",
        "/v1/adapters",
        "list_adapters",
        MODELS,
        "List adapters and where each one is",
        replies={200: ReplyShape(description="The adapters.", shape=AdapterList)},
    ),
    Operation(
        "post",
        "/v1/adapters/{name}/pin",
        "pin_adapter",
        MODELS,
        "Keep an adapter in memory",
        parameters=(_ADAPTER,),
        replies={200: ReplyShape(description="The adapter as it is now.", shape=AdapterInfo)},
        errors=(400, 404, 503),
    ),
    Operation(
        "delete",
        "/v1/adapters/{name}/pin",
        "unpin_adapter",
        MODELS,
        "Let an adapter leave memory again",
        parameters=(_ADAPTER,),
        replies={200: ReplyShape(description="The adapter as it is now.", shape=AdapterInfo)},
        errors=(400, 404, 503),
    ),
    Operation(
        "post",
        "/v1/load_lora_adapter",
        "load_adapter",
        MODELS,
        "Serve an adapter",
        body=Body(
            shape=EngineBody("request", "load_adapter"),
            example={"lora_name": "pirate", "lora_path": "/models/adapters/pirate"},
        ),
        replies={200: ReplyShape(description="It is served.", shape=AdapterChanged)},
        errors=(404, 503),
    ),
    Operation(
        "post",
        "/v1/unload_lora_adapter",
        "unload_adapter",
        MODELS,
        "Serve an adapter no longer",
        "Running requests finish on it.",
        body=Body(shape=EngineBody("request", "unload_adapter"), example={"lora_name": "pirate"}),
        replies={200: ReplyShape(description="No new request can name it.", shape=AdapterChanged)},
        errors=(404, 503),
    ),
    Operation(
        "get",
        "/v1/engine/state",
        "engine_state",
        OPERATE,
        "See what runs, what waits and why",
        parameters=(
            Parameter(
                "limit",
                "query",
                {"type": "integer", "minimum": 0, "maximum": 999_999_999, "default": DEFAULT_LIMIT},
                f"Most requests of each kind; no more than {MAX_LIMIT} are given.",
            ),
        ),
        replies={200: ReplyShape(description="One moment between two steps.", shape=EngineStanding)},
        errors=(400, 503),
    ),
    Operation(
        "get",
        "/v1/nodes",
        "list_nodes",
        OPERATE,
        "List nodes and what each one does",
        "Of everybody's KV and of failures only operators are told: for others these are null.",
        replies={
            200: ReplyShape(description="The nodes, in the order in which they joined.", shape=NodeList)
        },
    ),
    Operation(
        "post",
        "/v1/nodes/{id}/drain",
        "drain_node",
        OPERATE,
        "Give a node no new work",
        "Running answers end there. It goes on after the reply: the list of nodes tells how far it is.",
        parameters=(_NODE,),
        body=Body(shape=NodeChange, example={"timeout_s": 60}, is_required=False),
        replies={202: ReplyShape(description="It has begun.", shape=NodeStatus)},
        errors=(404, 409, 503),
    ),
    Operation(
        "post",
        "/v1/nodes/{id}/restart",
        "restart_node",
        OPERATE,
        "Drain a node and start it again",
        "It goes on after the reply. The node is back when it is `ready` with another `incarnation`.",
        parameters=(_NODE,),
        body=Body(shape=NodeChange, example={"timeout_s": 60}, is_required=False),
        replies={202: ReplyShape(description="It has begun.", shape=NodeStatus)},
        errors=(404, 409, 503),
    ),
    Operation(
        "post",
        "/v1/nodes/{id}/reopen",
        "reopen_node",
        OPERATE,
        "Give a drained node work again",
        parameters=(_NODE,),
        replies={200: ReplyShape(description="The node as it is now.", shape=NodeStatus)},
        errors=(404, 409),
    ),
    Operation(
        "get",
        "/metrics",
        "metrics",
        OPERATE,
        "Figures for Prometheus",
        replies={200: ReplyShape(description="Its text format.", media=("text/plain",))},
    ),
    Operation(
        "get",
        "/healthz",
        "healthz",
        OPERATE,
        "Whether the process answers",
        replies={200: ReplyShape(description="It does.", shape=Alive)},
        is_public=True,
    ),
    Operation(
        "get",
        "/readyz",
        "readyz",
        OPERATE,
        "Whether requests are taken now",
        replies={
            200: ReplyShape(description="They are.", shape=Ready),
            503: ReplyShape(description="Not now, and how far the engine has come.", shape=NotReady),
        },
        is_public=True,
    ),
    *(
        Operation(
            method,
            path,
            name,
            OPERATE,
            "Whether requests are taken now (as vLLM's server has it)",
            "As `/readyz`, for probes that are set up for `vllm serve` or for SageMaker.",
            replies={
                200: ReplyShape(description="They are.", shape=Ready),
                503: ReplyShape(description="Not now, and how far the engine has come.", shape=NotReady),
            },
            is_public=True,
        )
        for method, path, name in _PROBES
    ),
    Operation(
        "get",
        "/version",
        "version",
        OPERATE,
        "The release of vLLM, and of this server",
        replies={200: ReplyShape(description="Both.", shape=Versions)},
        is_public=True,
    ),
    Operation(
        "get",
        "/load",
        "load",
        OPERATE,
        "How many requests run or wait",
        replies={200: ReplyShape(description="Their number.", shape=ServerLoad)},
    ),
    Operation(
        "post",
        "/sleep",
        "sleep",
        OPERATE,
        "Free the GPU's memory for a while (vLLM)",
        "Where the server was started with --enable-sleep-mode. Requests are refused meanwhile; conversations keep their KV.",
        parameters=(
            Parameter("mode", "query", _TEXT, "`abort` ends running answers, `wait` lets them finish."),
            Parameter("level", "query", _TEXT, "1: the weights are kept in host memory."),
        ),
        replies={200: ReplyShape(description="The engine sleeps.", shape=Slept)},
        errors=(400, 403, 409, 503),
    ),
    Operation(
        "post",
        "/wake_up",
        "wake_up",
        OPERATE,
        "Take the GPU's memory back (vLLM)",
        replies={200: ReplyShape(description="The engine is awake.", shape=Woken)},
        errors=(400, 403, 503),
    ),
    Operation(
        "get",
        "/is_sleeping",
        "is_sleeping",
        OPERATE,
        "Whether the engine sleeps (vLLM)",
        replies={200: ReplyShape(description="Whether it does.", shape=IsSleeping)},
    ),
    Operation(
        "post",
        "/tokenize",
        "tokenize",
        MODELS,
        "Split a text or a conversation into tokens",
        body=Body(shape=EngineBody("request", "tokenize"), example={"model": MODEL, "prompt": "Lisbon is"}),
        replies={200: ReplyShape(description="Their ids.", shape=EngineBody("reply", "tokenize"))},
        errors=(404, 503),
    ),
    Operation(
        "post",
        "/detokenize",
        "detokenize",
        MODELS,
        "Turn tokens back into text",
        body=Body(shape=EngineBody("request", "detokenize"), example={"model": MODEL, "tokens": [5, 6, 7]}),
        replies={200: ReplyShape(description="The text.", shape=EngineBody("reply", "detokenize"))},
        errors=(404, 503),
    ),
    Operation(
        "get",
        "/tokenizer_info",
        "tokenizer_info",
        MODELS,
        "The tokenizer's settings",
        "Its special tokens and the chat template among them.",
        replies={200: ReplyShape(description="The settings.", shape=EngineBody("reply", "tokenizer_info"))},
        errors=(503,),
    ),
    *PAGE_OPERATIONS,
)
