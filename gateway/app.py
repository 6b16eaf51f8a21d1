"""The gateway as a process: build the parts, open the port, bring the engine up, serve, drain, close."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import uvloop
from aiohttp import web

from engine_bridge.calls.pictures import LARGEST_IN_A_CALL
from engine_bridge.driver.adapters.hub import with_fetched
from engine_bridge.driver.engine.building import configure_environment
from engine_bridge.local_node import LocalNode
from engine_bridge.policy.limits.model_support import Unservable
from engine_bridge.policy.nodes.session_locations import MAX_SESSIONS
from engine_bridge.process_end import CLOSE_S, leave, leave_within, stop_collecting
from engine_bridge.protocol.errors import BridgeError
from engine_bridge.protocol.node import Node
from engine_bridge.settings.engine_config import Device, EngineConfig, EngineSettings
from engine_bridge.settings.lora_modules import parse_lora_modules
from engine_bridge.settings.node_config import LocalNodeConfig
from engine_bridge.tracing import Traces
from gateway.access.auth import LOCAL, KeyRing, tenant_of
from gateway.access.budgets import Gatekeeper, RequestBudgets
from gateway.access.person_limits import in_force
from gateway.advisories import learned_file
from gateway.advisories.advisories import Advisories
from gateway.advisories.drafts import Drafts
from gateway.advisories.learned import Learned
from gateway.background import work_beside
from gateway.commands.remedies import ASK_THE_DOCTOR, known_remedy
from gateway.doors.api import (
    batch_routes,
    conversation_routes,
    openai_routes,
    pooling_routes,
    response_routes,
    vllm_routes,
)
from gateway.doors.chat import server_events, socket
from gateway.doors.description import openapi
from gateway.doors.http import web_policy
from gateway.doors.http.admission import MOST_AT_ONCE
from gateway.doors.http.certificate import CERTIFICATE, Certificate
from gateway.doors.http.connections import (
    CONNECTIONS,
    Connections,
    Runner,
    max_open_files,
    raise_open_files,
    watched,
)
from gateway.doors.http.unix_socket import UnixSite
from gateway.doors.rest import (
    adapters,
    advisories,
    documents,
    engine,
    kv_hints,
    nodes,
    oidc,
    people,
    pictures,
    sessions,
    shelf,
    sign_in,
    tools,
    transfers,
    usage,
)
from gateway.doors.rest.trusted_user import named_by_proxy
from gateway.errors import StartupError
from gateway.metrics.adapters import AdapterCollector
from gateway.metrics.kv import KvCollector
from gateway.metrics.metrics import Metrics
from gateway.metrics.nodes import NodeCollector, RouterCollector
from gateway.metrics.scheduling import GrammarCollector, SchedulingCollector, TokenizerCollector
from gateway.nodes import engine_process
from gateway.nodes.adapter_sync import AdapterSync
from gateway.nodes.cluster import make_placement
from gateway.nodes.known_nodes import nodes_of
from gateway.nodes.maintenance import NodeMaintenance
from gateway.nodes.pooling_process import models_beside
from gateway.nodes.router import Router
from gateway.packages import CPU_BUILD, installed
from gateway.people.audit import NAME as audit_file
from gateway.people.audit import AuditLog
from gateway.people.named_by_proxy import TrustedHeader
from gateway.people.oidc import OidcProvider
from gateway.people.sign_ins import SignIns
from gateway.people.usage import Usage
from gateway.services import SERVICES, Services
from gateway.sessions import PictureRoom, SessionStore
from gateway.settings.config import API_SWITCHES, MIB, Config
from gateway.settings.logs import texts_are_ours
from gateway.settings.priorities import parse_weights
from gateway.settings.sources import template_of
from gateway.tools.toolbox import toolbox_of
from gateway.turns.turns import Turns
from kvtiers.closing import going_on

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 1.0
# Modules whose routes need nothing made beforehand.
DOORS = (
    *(
        sessions,
        openai_routes,
        batch_routes,
        pooling_routes,
        response_routes,
        conversation_routes,
        vllm_routes,
    ),
    *(advisories, kv_hints, adapters, engine, nodes, tools),
    *(people, sign_in, oidc, usage, transfers, pictures),
)
CLOSE_STREAMS_S = 5.0


def engine_config(config: Config) -> EngineConfig:
    """Return the engine's part of the settings."""
    device = config.device if config.device != "auto" else detect_device()
    dtype = config.dtype
    if dtype == "auto" and device == "cpu" and config.is_demo_model:
        dtype = "float32"  # docs/decisions/0005
    values = {name: getattr(config, name) for name in EngineSettings.__struct_fields__}
    own = {
        "profile_dir": config.profile_dir,
        "weights_memory": config.weights_memory,
        "kernel_cache": config.kernel_cache,
        "reasoning_parser": config.reasoning_parser,
        "parser_plugins": config.parser_plugins,
    }
    found = {"device": device, "dtype": dtype, "enable_lora": config.adapters != "off"}
    return EngineConfig(**values | found | own)


def detect_device() -> Device:
    """Return `cpu` if vLLM's CPU build is installed, else `cuda`."""
    return "cpu" if installed(CPU_BUILD) is not None else "cuda"


def node_config(config: Config) -> LocalNodeConfig:
    """Return the node's part of the settings. Raises ConfigError for a chat template that cannot be read, BridgeError for an adapter of a hub."""
    template = template_of(config, "chat_template")
    return LocalNodeConfig(
        engine=msgspec.structs.replace(engine_config(config), chat_template=template),
        adapters=with_fetched(parse_lora_modules(config.lora_modules)),
        adapters_dir=config.adapters_dir,
        state_dir=config.data_dir,
        length_predictor=config.length_predictor,
        limits=config.request_limits,
        tool_parser=config.tool_parser,
        context_overflow=config.context_overflow,
        # What tools return comes from anywhere, so it must not pass for the system's words.
        special_tokens_in_content="split" if config.mcp_servers else config.special_tokens_in_content,
        default_chat_template_kwargs=json.loads(config.default_chat_template_kwargs or "{}"),
        chat_template_content_format=config.chat_template_content_format,
        api_switches=tuple(name for name in API_SWITCHES if getattr(config, name)),
    )


async def build_services(
    config: Config, *, node: Node | None = None, metrics: Metrics | None = None
) -> Services:
    """Build all parts, without starting the engine. Raises ConfigError or StartupError with a text for the operator."""
    keys = await _read_keys(config)
    data_dir = await asyncio.to_thread(config.prepare_data_dir)
    store = await _open_store(config, data_dir, keys)
    node = node or await _make_node(config)
    if isinstance(node, Router):
        node.remember((tenant_of(owner), name, home) for owner, name, home in await store.homes(MAX_SESSIONS))
    metrics = metrics or Metrics()
    metrics.session_wal_lost_frames.set(store.wal_lost_frames)
    prompt_chars = _prompt_chars(config, node)
    toolbox = toolbox_of(config, metrics)
    drafts = Drafts(
        node, store, metrics, toolbox, accepts_drafts=config.draft_prefill, max_chars=prompt_chars
    )
    advisories = Advisories(node, store, metrics, drafts, may_hurry=config.client_priority)
    budgets = await _make_budgets(config, metrics, keys)
    used, audit = await Usage.open(config, keys, metrics, data_dir), AuditLog(data_dir / audit_file)
    traces = _traces(config)
    beside = models_beside(config, (await asyncio.to_thread(engine_config, config)).device)
    turns = Turns(
        node,
        store,
        metrics,
        drafts,
        advisories,
        prompt_chars=prompt_chars,
        keeps_questions=config.length_predictor is not None,
        home_of=node.home_of if isinstance(node, Router) else lambda tenant, session_id: "",
        traces=traces,
        toolbox=toolbox,
    )
    learned = Learned(node, advisories, is_on=config.learned_advisories, file=data_dir / learned_file.NAME)
    await learned.load()
    return Services(
        config,
        node,
        store,
        turns,
        keys,
        metrics,
        drafts,
        advisories,
        learned,
        budgets,
        Gatekeeper(keys, metrics, on_refused=audit.refused),
        used,
        await SignIns.open(used.ledger, keys),
        audit,
        NodeMaintenance(nodes_of(node), config.drain_timeout_s),
        _tell_of(node, metrics, keys if config.metrics_by_user else None),
        traces,
        beside.get("embeddings"),
        beside.get("rerank"),
        await asyncio.to_thread(OidcProvider.of, config),
    )


async def _read_keys(config: Config) -> KeyRing:
    """Raises StartupError for a key file that cannot be read."""
    # Files are read in threads, as everywhere else: signals are answered while a slow disk is waited for.
    keys = await asyncio.to_thread(
        KeyRing,
        config.api_keys,
        operator_keys=config.operator_keys,
        key_file=config.api_key_file,
        weights=parse_weights(config.tenant_weights),
    )
    if not keys.is_open and not keys.has_operator:
        log.warning(
            "no key is an operator's: nobody can read /metrics (make one: overture users add --operator)"
        )
    return keys


async def _make_budgets(config: Config, metrics: Metrics, keys: KeyRing) -> RequestBudgets:
    engine = await asyncio.to_thread(engine_config, config)  # which device there is stands in files
    return RequestBudgets.of(config, metrics, engine.sure_seqs, keys)


def _traces(config: Config) -> Traces:
    """Raises StartupError for an endpoint that is no address."""
    try:
        return Traces(config.otlp_endpoint)
    except ValueError as error:
        raise StartupError(f"otlp_endpoint: {error}") from error


def _prompt_chars(config: Config, node: Node) -> Callable[[], int]:
    """Return a function for the longest prompt that is accepted, which is known once the engine is up."""
    return lambda: config.request_limits.prompt_chars(node.max_model_len)


def _tell_of(node: Node, metrics: Metrics, people: KeyRing | None) -> NodeCollector:
    """Register the node's figures among the metrics. people: knows the names of tenants; None: the metrics do not tell them apart."""
    name_of = (lambda tenant: people.name_of(tenant or LOCAL.owner)) if people is not None else None
    metrics.registry.register(KvCollector(lambda: node.figures().kv_tiers))
    metrics.registry.register(AdapterCollector(lambda: node.figures().adapter_stats))
    metrics.registry.register(SchedulingCollector(lambda: node.figures().scheduling_stats, name_of))
    metrics.registry.register(GrammarCollector(lambda: node.figures().grammar_stats))
    metrics.registry.register(TokenizerCollector(lambda: node.figures().tokenizer_stats))
    if isinstance(node, Router):
        metrics.registry.register(RouterCollector(node.counts))
    by_node = NodeCollector()
    metrics.registry.register(by_node)
    return by_node


async def _open_store(config: Config, data_dir: Path, keys: KeyRing) -> SessionStore:
    room = PictureRoom(LARGEST_IN_A_CALL * config.max_image_mpixels * 1e6, config.max_body_bytes)

    def max_bytes_of(owner: str) -> int:
        """Return what an owner may store."""
        return in_force(keys.limits_of(owner).stored_mib, config.max_stored_mib) * MIB

    return await SessionStore.open(
        data_dir / "sessions.sqlite3", max_bytes_of=max_bytes_of, picture_room=room
    )


async def _make_node(config: Config) -> Node:
    settings = await asyncio.to_thread(node_config, config)
    if config.is_cluster:
        placement = await asyncio.to_thread(make_placement, config, settings, _stage_sayer())
        adapters = AdapterSync(
            lambda: placement.nodes,
            config.data_dir,
            config.adapters_dir,
            settings.adapters,
        )
        return Router(placement, adapters, config.routing_policy)
    if config.engine == "process":
        return engine_process.make_node(settings, config.log_format, config.log_level)
    return LocalNode(settings)


def build_app(services: Services) -> web.Application:
    """Return the aiohttp application over the services; it owns their background tasks, not the services themselves."""
    connections = Connections(services.config, services.keys, services.metrics, max_open_files())
    app = web.Application(
        client_max_size=services.config.max_body_bytes,
        middlewares=[
            web_policy.counts,
            web_policy.traced,
            web_policy.errors,
            watched(connections),
            web_policy.origins,
            named_by_proxy(TrustedHeader(services.config)),
            web_policy.lead_to_route,
        ],
    )
    app[SERVICES] = services
    app[CONNECTIONS] = connections
    for door in DOORS:
        app.add_routes(door.ROUTES)
    app.add_routes([web.get("/ws", socket.chat_socket)])
    openapi.add_routes(app)
    documents.add_routes(app)
    shelf.add_routes(app)
    server_events.add_routes(app)
    app.on_response_prepare.append(web_policy.add_headers)
    app.cleanup_ctx.append(work_beside)
    return app


class Server:
    """A gateway on a port. `async with` it in tests; `run` does so for the command line.

    on_drained: called when all answers have ended or were cut off, before anything is closed.
    """

    def __init__(self, services: Services, on_drained: Callable[[], None] = lambda: None) -> None:
        self.services = services
        self._on_drained = on_drained
        self._runner: web.AppRunner | None = None
        self._unix_site: UnixSite | None = None
        self.port = 0

    async def __aenter__(self) -> Server:
        config = self.services.config
        try:
            certificate = await asyncio.to_thread(_certificate, config)
        except StartupError:
            await self.services.store.close()
            raise
        # handler_cancellation: without it a client that leaves does not end a request that is not streamed.
        # auto_decompress: aiohttp unpacks on the event loop, and a small body may hold a very large one; see rest.json_body.
        app = build_app(self.services)
        if certificate is not None:
            app[CERTIFICATE] = certificate
        self._runner = Runner(
            app,
            app[CONNECTIONS],
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=config.keepalive_timeout_s,
            shutdown_timeout=CLOSE_STREAMS_S,
        )
        await self._runner.setup()
        try:
            await (
                self._listen_at_a_path(config.uds)
                if config.uds is not None
                else self._listen(config, certificate)
            )
        except StartupError:
            await self._runner.cleanup()
            await self.services.store.close()
            raise
        return self

    async def _listen_at_a_path(self, path: Path) -> None:
        assert self._runner is not None
        site = UnixSite(self._runner, path, backlog=MOST_AT_ONCE)
        await site.start()
        self._unix_site = site

    async def _listen(self, config: Config, certificate: Certificate | None) -> None:
        assert self._runner is not None
        tls = certificate.context if certificate is not None else None
        site = web.TCPSite(self._runner, config.host, config.port, backlog=MOST_AT_ONCE, ssl_context=tls)
        try:
            await site.start()
        except OSError as error:
            raise StartupError(
                f"cannot listen on {config.host}:{config.port}: {error.strerror or error}. "
                "Is another server running? Choose another port with --port."
            ) from error
        self.port = self._runner.addresses[0][1]

    async def __aexit__(self, *exc_info: object) -> None:
        """Drain, tell every socket, and close the parts, the ones that others report to last. A failure on the way stops none of it."""
        services = self.services
        await self._drain(services.config.drain_timeout_s)
        self._on_drained()
        await _done("the chat sockets", socket.close_all(services))
        if self._runner is not None:
            await _done("the HTTP server", self._runner.cleanup())
        if self._unix_site is not None:
            await _done("the socket file", asyncio.to_thread(self._unix_site.remove))
        await _done("what was learned of agents", services.learned.save())
        await _done("what people used", services.usage.close())
        await _done("the audit log", services.audit.write())
        for model in services.models_beside:
            await _done(f"the model {model.name}", model.close())
        await _done("the node", services.node.close())
        await _done("the session database", services.store.close())
        await _done("the traces", asyncio.to_thread(services.traces.close))

    async def _drain(self, timeout_s: float) -> None:
        services = self.services
        deadline = time.monotonic() + timeout_s
        draining = asyncio.create_task(_done("the node's answers", services.node.drain(timeout_s)))
        await _done("the engine room", services.engine_feed.close())
        await _done("work on nodes", services.maintenance.close())
        await _done("erasures", services.erasures.drain())
        await _done("drafts", services.drafts.close())
        await _done("titles", services.titles.close())
        await asyncio.gather(
            _done("chat turns", services.turns.drain(timeout_s)),
            _done("responses in the background", services.background.drain(timeout_s)),
        )
        await asyncio.wait({draining}, timeout=max(deadline - time.monotonic(), 0.1))
        # A node that hangs says nothing of its drain.
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)

    @property
    def url(self) -> str:
        """The address at which the server answers."""
        if self._unix_site is not None:
            return self._unix_site.name
        host = self.services.config.host
        scheme = "http" if self.services.config.ssl_certfile is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"


async def _done(what: str, work: Awaitable[object]) -> None:
    """Do one step of the shutdown; an error in it is logged and keeps no other step from being done."""
    with going_on(what):
        await work


def _certificate(config: Config) -> Certificate | None:
    """Return the certificate; None if the server speaks plain HTTP. Raises StartupError."""
    if config.ssl_certfile is None:
        return None
    return Certificate(
        config.ssl_certfile,
        config.ssl_keyfile,
        ca_certs=config.ssl_ca_certs,
        cert_reqs=config.ssl_cert_reqs,
        ciphers=config.ssl_ciphers,
    )


def run(config: Config) -> NoReturn:
    """Serve until SIGTERM or SIGINT, and end the process with its exit code."""
    if config.engine == "in-process" and not config.is_cluster:
        # Before anything imports torch: it reads its environment once.
        configure_environment(engine_config(config))
    raise_open_files()
    uvloop.run(_serve_and_leave(config))
    raise AssertionError("the process has ended")


async def _serve_and_leave(config: Config) -> None:
    # Before the event loop's own end, which waits for threads that a disk may hold up.
    leave(await _serve(config))


async def _serve(config: Config) -> int:
    for warning in config.warnings():
        log.warning("%s", warning)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, stop, number)
    try:
        services = await build_services(config)
        async with Server(services, on_drained=stop_collecting) as server:
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: it is to survive its terminal
                loop.add_signal_handler(signal.SIGHUP, _on_hangup, services, stop, _has_terminal())
            say(f"Overture is at {server.url}")
            is_up = await _bring_up(services, stop)
            if is_up:
                await stop.wait()
                say("going down: running answers may finish; interrupt again to cut them off")
            leave_within(config.drain_timeout_s + CLOSE_S)
            return 0 if is_up or stop.is_set() else 1
    except (StartupError, BridgeError) as error:
        say(f"error: {error}")
        return 2


def on_signal(stop: asyncio.Event, number: int) -> None:
    """Begin an orderly stop; a second signal ends the process at once."""
    if stop.is_set():  # the second one: the user does not want to wait
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    stop.set()


def _on_hangup(services: Services, stop: asyncio.Event, had_terminal: bool) -> None:
    """Handle SIGHUP: read the key file again; without one, or if the server's terminal has closed, stop as with SIGTERM.

    A second SIGHUP does not end the process at once: the kernel and the shell may both send one.
    """
    if services.config.api_key_file is None or (had_terminal and not _has_terminal()):
        stop.set()
    else:
        services.look_at_keys.set()


def _has_terminal() -> bool:
    """Return whether this process belongs to a terminal. Source: tty(4); a terminal that hung up leaves its processes without one."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def _bring_up(services: Services, stop: asyncio.Event) -> bool:
    """Start the engine and print its progress. Return False if it failed or the process was told to stop meanwhile."""
    started_s = time.monotonic()
    starting = asyncio.create_task(services.node.start())
    stopping = asyncio.create_task(stop.wait())
    last_stage = ""
    while not starting.done() and not stopping.done():
        await asyncio.wait(
            {starting, stopping}, timeout=PROGRESS_EVERY_S, return_when=asyncio.FIRST_COMPLETED
        )
        progress = services.node.progress
        # Several nodes say it for themselves, each with its name.
        if progress.stage != last_stage and progress.state == "starting" and not services.config.is_cluster:
            last_stage = progress.stage
            say(f"  {time.monotonic() - started_s:5.1f} s  {last_stage}")
    if not starting.done():  # told to stop: whatever is being built ends with the process
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return False
    stopping.cancel()
    if (error := starting.exception()) is not None:
        say_failure(error)
        return False
    adapters = ", ".join(info.name for info in services.node.adapters())
    say(
        f"  {time.monotonic() - started_s:5.1f} s  ready: {services.config.served_model_name}"
        + (f" with {adapters}" if adapters else "")
    )
    return not stop.is_set()


def say_failure(error: BaseException) -> None:
    """Print why the engine did not start and what to do; the log gets the traceback of an error that nothing is known about."""
    why, remedy = str(error), known_remedy(str(error))
    if isinstance(error, Unservable) and error.remedy:
        why, remedy = error.why, error.remedy
    is_ours = isinstance(error, BridgeError)
    if not is_ours and not remedy:
        with texts_are_ours():  # no client has been read yet
            log.error("the engine could not be started", exc_info=error)
    say(f"error: the engine could not be started: {why}")
    if not is_ours or isinstance(error, Unservable):  # other errors of ours say it in themselves
        say(f"  what to do: {remedy or ASK_THE_DOCTOR}")


def _stage_sayer() -> Callable[[str, str], None]:
    """Return a function that prints how far each node has come, and with the name "" what all of them wait for."""
    started_s = time.monotonic()

    def say_stage(node_id: str, stage: str) -> None:
        """Print a stage with the seconds since the start."""
        say(f"  {time.monotonic() - started_s:5.1f} s  {f'{node_id}: ' if node_id else ''}{stage}")

    return say_stage


def say(line: str) -> None:
    """Print a line for the person at the terminal; the log goes to stderr. A closed terminal must not keep the server from draining."""
    with contextlib.suppress(OSError):
        print(line, flush=True)
