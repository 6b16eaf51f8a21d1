"""`POST /v1/embeddings`, `/rerank` and `/score`, which models beside the chat model answer, behind the same port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

from aiohttp import web

from engine_bridge.protocol.api_errors import unknown_model
from engine_bridge.protocol.engine_request import EngineRequest
from gateway.access.auth import tenant_of
from gateway.doors.api.call_size import check_inputs
from gateway.doors.api.openai_routes import as_response
from gateway.doors.api.recording import adapter_named
from gateway.doors.http.bodies import json_body
from gateway.doors.http.web_policy import REQUEST_ID_HEADER, request_id
from gateway.errors import GatewayError
from gateway.people.ledger import Spent
from gateway.services import SERVICES, Services

PoolingApi = Literal["embeddings", "rerank", "score"]

# Token ids in one body. Source: OpenAI's bound on all inputs of a call for embeddings.
MOST_TOKENS = 300_000
NO_EMBEDDINGS = (
    "This server makes no embeddings: its operator can name a model for them with --embedding-model."
)
NO_SCORES = "This server scores no texts: its operator can name a model for that with --rerank-model."


def _handler(api: PoolingApi) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        """Answer one call."""
        services = request.app[SERVICES]
        principal = services.admit(request)
        # An embedding model scores, too: by how alike the embeddings of two texts are.
        model = services.embeddings if api == "embeddings" else services.reranker or services.embeddings
        if model is None:
            raise GatewayError("not_found", NO_EMBEDDINGS if api == "embeddings" else NO_SCORES)
        services.usage.check(principal.owner)
        services.budgets.ask(principal.owner)
        model.check_is_up()
        num_tokens, seconds = services.metrics.pooling(api)
        # Before the body is read: waiting bodies take memory, too.
        with services.budgets.enter(principal.owner), seconds.time():
            async with services.calls.of(principal):
                body = await json_body(request, MOST_TOKENS)
                _check_model(services, api, model.name, body)
                config = services.config
                max_chars = config.request_limits.prompt_chars(model.max_model_len)
                limits = {"max_inputs": config.max_embedding_inputs, "max_all_chars": config.max_body_bytes}
                check_inputs(api, body, max_chars=max_chars, **limits)
                asker = EngineRequest(tenant=tenant_of(principal.owner))
                reply = await model.answer(api, body, {REQUEST_ID_HEADER: request_id(request)}, asker)
                num_tokens.inc(reply.num_prompt_tokens)
                services.usage.add(principal.owner, Spent(1, reply.num_prompt_tokens, 0))
                return as_response(reply)

    return answer


def _check_model(services: Services, api: PoolingApi, own: str, body: Any) -> None:
    """Raise GatewayError for a call that names another model than the one that answers it; vLLM itself refuses a name that is no text."""
    named = body.get("model") if isinstance(body, dict) else None
    if not isinstance(named, str) or named in ("", own):
        return
    others = [
        *(info.name for info in services.node.adapters()),
        *(each.name for each in services.models_beside),
    ]
    if named in others or adapter_named(services, body) is None:
        does_not, does = (
            ("makes no embeddings", "them") if api == "embeddings" else ("scores no texts here", "that")
        )
        message = f"The model `{named}` {does_not}. The model for {does} is `{own}`."
        raise GatewayError("bad_request", message, param="model")
    raise GatewayError("unknown_model", unknown_model(named, [own]), param="model")


ROUTES = (
    web.post("/v1/embeddings", _handler("embeddings")),
    *(web.post(path, _handler("rerank")) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    *(web.post(path, _handler("score")) for path in ("/score", "/v1/score")),
)
