"""`POST /v1/embeddings`, which a second model behind the same port answers."""

from __future__ import annotations

from typing import Any

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

# Token ids in one body. Source: OpenAI's bound on all inputs of a call for embeddings.
MOST_TOKENS = 300_000
NO_MODEL = "This server makes no embeddings: its operator can name a model for them with --embedding-model."


async def embeddings(request: web.Request) -> web.Response:
    """Answer one call for embeddings."""
    services = request.app[SERVICES]
    principal = services.admit(request)
    model = services.embeddings
    if model is None:
        raise GatewayError("not_found", NO_MODEL)
    services.usage.check(principal.owner)
    services.budgets.ask(principal.owner)
    model.check_is_up()
    # Before the body is read: waiting bodies take memory, too.
    with services.budgets.enter(principal.owner), services.metrics.embedding_s.time():
        async with services.calls.of(principal):
            body = await json_body(request, MOST_TOKENS)
            _check_model(services, model.name, body)
            config = services.config
            max_chars = config.request_limits.prompt_chars(model.max_model_len)
            check_inputs(body, max_inputs=config.max_embedding_inputs, max_chars=max_chars)
            asker = EngineRequest(tenant=tenant_of(principal.owner))
            reply = await model.embed(body, {REQUEST_ID_HEADER: request_id(request)}, asker)
            services.metrics.embedding_tokens.inc(reply.num_prompt_tokens)
            services.usage.add(principal.owner, Spent(1, reply.num_prompt_tokens, 0))
            return as_response(reply)


def _check_model(services: Services, own: str, body: Any) -> None:
    """Raise GatewayError for a call that names another model than the embedding model; vLLM itself refuses a name that is no text."""
    named = body.get("model") if isinstance(body, dict) else None
    if not isinstance(named, str) or named in ("", own):
        return
    if adapter_named(services, body) in (None, *(info.name for info in services.node.adapters())):
        message = f"The model `{named}` makes no embeddings. The model for them is `{own}`."
        raise GatewayError("bad_request", message, param="model")
    raise GatewayError("unknown_model", unknown_model(named, [own]), param="model")


ROUTES = (web.post("/v1/embeddings", embeddings),)
