"""The parts that every door of the gateway needs, in one place."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web

from engine_bridge.protocol.node import Node
from engine_bridge.tracing import NO_TRACES, Traces
from gateway.access.addresses import address_of
from gateway.access.auth import KeyRing, Principal, extract_key
from gateway.access.budgets import Gatekeeper, RequestBudgets
from gateway.access.hosts import netloc
from gateway.access.open_calls import OpenCalls
from gateway.advisories.advisories import Advisories
from gateway.advisories.drafts import Drafts
from gateway.advisories.learned import Learned
from gateway.documents.reader import DocumentReader
from gateway.errors import GatewayError
from gateway.hints.kv_hints import KvHints
from gateway.metrics.metrics import Metrics
from gateway.metrics.nodes import NodeCollector
from gateway.nodes.maintenance import NodeMaintenance
from gateway.nodes.pooling_process import PoolingModel
from gateway.people.audit import AuditLog, Entry
from gateway.people.erasures import Erasures
from gateway.people.named_by_proxy import NAMED_BY_PROXY
from gateway.people.oidc import OidcProvider
from gateway.people.sign_ins import COOKIE, SignIns
from gateway.people.usage import Usage
from gateway.recognition.recognition import Recognition
from gateway.sessions import SessionStore
from gateway.settings.config import Config
from gateway.turns.background_responses import BackgroundResponses
from gateway.turns.engine_feed import EngineFeed
from gateway.turns.list_feed import ListFeed
from gateway.turns.titles import Titles
from gateway.turns.turns import Turns

# Chosen: one takes about a third of a millisecond.
UPGRADES_AT_ONCE = 16
# How `Principal.key` begins of a person whom a proxy names.
BY_PROXY = "proxy "
# Of a path in the audit log. Chosen: names of nodes and adapters fit.
MAX_AUDITED_CHARS = 300


class OpenSocket(Protocol):
    """A chat socket, as seen by the parts that close it or send it frames."""

    is_given_up: bool
    """It is being closed, since it reads too slowly."""

    @property
    def owner(self) -> str | None:
        """The owner of the socket's sessions; None before a hello with a good key."""

    @property
    def key(self) -> str | None:
        """Which of its owner's keys opened it, as `Principal.key`; None before a hello with a good key."""

    @property
    def blocked_since(self) -> float | None:
        """Time on the monotonic clock since when the peer has taken none of the waiting frames; None if nothing waits."""

    def has_read(self, session_id: str) -> bool:
        """Return whether its client has recently asked for this session, or for an answer in it."""

    def tell(self, frame: dict[str, Any]) -> None:
        """Send a frame that its client did not ask for."""

    async def revoke(self) -> None:
        """Say that the key was withdrawn, and close."""

    async def close(self, code: int, reason: str) -> None:
        """Close the socket with a code and a reason for its client."""

    def abort(self) -> None:
        """Cut the connection without waiting for the peer."""


@dataclass(eq=False)
class Services:
    """The parts of a running gateway."""

    config: Config
    node: Node
    store: SessionStore
    turns: Turns
    keys: KeyRing
    metrics: Metrics
    drafts: Drafts
    advisories: Advisories
    learned: Learned
    budgets: RequestBudgets
    gatekeeper: Gatekeeper
    usage: Usage
    sign_ins: SignIns
    audit: AuditLog
    maintenance: NodeMaintenance
    node_metrics: NodeCollector
    traces: Traces = NO_TRACES
    embeddings: PoolingModel | None = None
    reranker: PoolingModel | None = None
    oidc: OidcProvider | None = None
    calls: OpenCalls = field(default_factory=OpenCalls)
    background: BackgroundResponses = field(default_factory=BackgroundResponses)
    erasures: Erasures = field(default_factory=Erasures)
    connections: set[OpenSocket] = field(default_factory=set)
    upgrading: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(UPGRADES_AT_ONCE))
    look_at_keys: asyncio.Event = field(default_factory=asyncio.Event)  # set: read the key file now
    reading_keys: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def models_beside(self) -> list[PoolingModel]:
        """The models that are served beside the chat model."""
        return [model for model in (self.embeddings, self.reranker) if model is not None]

    def __post_init__(self) -> None:
        self.recognition = Recognition(self.advisories, self.metrics)
        self.engine_feed = EngineFeed(self.maintenance, self.advisories, self.recognition.runs, self.keys)
        self.list_feed = ListFeed(self.store)
        self.documents = DocumentReader(self.config.document_s, self.config.document_mib)
        self.kv_hints = KvHints(self.advisories, self.recognition, self.node, self.metrics)
        self.titles = Titles(
            self.node, self.store, self.list_feed.changed, is_on=self.config.titles == "model"
        )
        self.turns.usage, self.turns.budgets = self.usage, self.budgets
        self.turns.on_first_answer = self.titles.first_answer

    def principal(self, request: web.Request) -> Principal:
        """Return the holder of the request's key, or without a key the person whose browser is signed in.

        Raises GatewayError `unauthorized`, `rate_limited` (wrong keys).
        """
        if (signed_in := self.signed_in(request)) is not None:
            return signed_in
        return self.gatekeeper.authenticate(extract_key(request.headers), request.remote)

    def signed_in(self, request: web.Request) -> Principal | None:
        """Return the person signed in without a key: named by a trusted proxy, else by the browser's cookie; None without either.

        Raises GatewayError `unauthorized` where the proxy names a person who may not be let in.
        """
        named = request.get(NAMED_BY_PROXY)
        if named is None or not _is_own_page(request):
            return self.by_cookie(request)
        person = self.keys.signed_in(named.owner, BY_PROXY + named.owner) if named.owner else None
        if person is None:
            why_not = (
                named.why_not or f"{named.name} is disabled. The server's operator can enable {named.name}."
            )
            raise GatewayError("unauthorized", why_not)
        return person

    def by_cookie(self, request: web.Request) -> Principal | None:
        """Return the person whose browser is signed in and sent the request; None for a request with a key, and for one of another origin's page.

        The cookie is `SameSite=Strict`, so browsers send it with requests of this site's own pages only. Pages of the same site at another origin,
        another port say, are kept out here, because an operator may have allowed their origin for use with keys.
        """
        cookie = request.cookies.get(COOKIE)
        if cookie is None or extract_key(request.headers) is not None or not _is_own_page(request):
            return None
        return self.sign_ins.principal(cookie)

    def admit(self, request: web.Request) -> Principal:
        """Return the holder of the request's key, and count a request against the owner's rate.

        Raises GatewayError `unauthorized`, `rate_limited`.
        """
        principal = self.principal(request)
        self.budgets.count(principal.owner)
        return principal

    def client_of(self, owner: str, request: web.Request, connection: object = None) -> str:
        """Return the client whose share the advice of this request counts against.

        That is the key's owner, or without keys one page (connection: of a page that has its own) or one address. So people who use a server
        without keys do not take each other's shares.
        """
        if not self.keys.is_open:
            return owner
        return f"socket {id(connection)}" if connection is not None else address_of(request.remote or "")

    def check_operator(self, principal: Principal, what: str) -> None:
        """Refuse anybody but an operator. what: is refused, in words ("/metrics is"). Raises GatewayError `forbidden`."""
        if not self.keys.is_operator(principal):
            raise GatewayError(
                "forbidden",
                f"{what} for an operator's key only: `overture users add NAME --operator` makes one.",
            )

    def note_operator(self, request: web.Request, principal: Principal) -> None:
        """Write into the audit log that an operator changes what concerns everybody, by the request's method and path."""
        about = f"{request.method} {request.path}"[:MAX_AUDITED_CHARS]
        self.audit.note(
            Entry(
                what="operator_action",
                who=principal.name,
                owner=principal.owner,
                place=request.remote or "",
                about=about,
            )
        )

    def check_may_change_adapters(self, principal: Principal) -> None:
        """Raise GatewayError if clients may not load, unload and pin adapters, or if that takes an operator's key."""
        if not self.config.allow_adapter_loading:
            raise GatewayError(
                "bad_request" if self.keys.is_open else "forbidden",
                "Clients may not change this server's adapters. Its operator can allow it with --allow-adapter-loading.",
            )
        self.check_operator(principal, "Changing adapters is")

    def models(self) -> list[dict[str, Any]]:
        """Return the `models` of the protocol: the base model, then the adapters."""
        base = {"id": self.config.served_model_name, "adapter": False}
        return [base] + [
            {"id": info.name, "adapter": True, "rank": info.rank} for info in self.node.adapters()
        ]

    def tell_shown(
        self,
        owner: str,
        session_id: str,
        turn_id: str,
        *,
        but: OpenSocket | None = None,
        is_changed: bool = False,
    ) -> None:
        """Tell the owner's sockets that have read this session which turn of it is shown now.

        The socket that asked for the change is left out. is_changed: the turn was shown before, and its answer is being continued.
        """
        shown = {"type": "shown", "session_id": session_id, "turn_id": turn_id, "is_changed": is_changed}
        self.list_feed.changed(owner, session_id, but=but)
        for socket in self.connections:
            if socket.has_read(session_id) and socket.owner == owner and socket is not but:
                socket.tell(shown)

    def user_info(self, principal: Principal) -> dict[str, Any] | None:
        """Return the person signed in, for a page that connects; None where no keys are asked for."""
        if self.keys.is_open:
            return None
        role = "operator" if principal.is_operator else "member"
        can_sign_out = not principal.key.startswith(BY_PROXY)
        return {"owner": principal.owner, "name": principal.name, "role": role, "can_sign_out": can_sign_out}

    def server_info(self, version: str) -> dict[str, Any]:
        """Return the server's facts for a page that connects."""
        return {
            "version": version,
            "model": self.config.served_model_name,
            "max_model_len": self.node.max_model_len,
            "max_message_bytes": self.config.max_frame_bytes,
            "max_document_bytes": self.config.max_body_bytes,
            "drafts": self.drafts.accepts_drafts,
            "max_images": self.node.max_images,
        }


def _is_own_page(request: web.Request) -> bool:
    """Return whether a page of this server sent a request, or a program did."""
    origin = request.headers.get("Origin")
    # Browsers say themselves whether a page of the same origin asks, to servers that they reach by HTTPS or on this machine.
    is_own = request.headers.get("Sec-Fetch-Site") == "same-origin"
    return is_own or origin is None or netloc(origin) == request.headers.get("Host", "").lower()


SERVICES = web.AppKey("services", Services)
