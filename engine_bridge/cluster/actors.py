"""Nodes as Ray actors; nothing else imports ray. `drive` is the life of the process that drives Ray for a gateway, `NodeActor` runs in the actors'.

Ray gives nodes their names, starts them again, and tells of those of other machines. It carries no work: that goes over sockets of ours. The
driver is no part of the gateway's process, since Ray's native code ends a process whose raylet has gone, and takes its signal handlers. Nodes run
on the machine of whoever asked for them.
"""

from __future__ import annotations

import asyncio
import hmac
import importlib
import ipaddress
import json
import logging
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import Struct

from engine_bridge.cluster import orders
from engine_bridge.cluster.guard import descendants, die_with_parent
from engine_bridge.cluster.host import CLOSE_S, OOM_SCORE, NodeAddress, NodeHost
from engine_bridge.cluster.orders import ClusterSettings, NodeToStart
from engine_bridge.cluster.trust import Trust
from engine_bridge.process_end import stop_collecting
from engine_bridge.protocol.errors import ClusterError

log = logging.getLogger(__name__)

NAMESPACE = "overture"
PREFIX = "overture-"
LOOK_EVERY_S = 0.5
# Between two attempts to start a node that cannot be started. Chosen.
PAUSE_S = 5.0
CONNECT_S = 5.0
JOIN_S = 60.0
# Measured: 4 s on an idle machine of two cores, 30 s at a load of 18. Chosen.
START_S = 180.0
# Nothing of ours goes through Ray's object store; it takes no less.
OBJECT_STORE_BYTES = 80 << 20
JOINED = "Ray runtime started"
# Longest text of one node's error. Chosen.
MAX_PROBLEM_CHARS = 2000
CORE_PROCESSES = {"raylet", "gcs_server"}
# The environment of all of Ray's processes, which must be set before ray is imported.
FIXED = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_worker_oom_score_adjustment": str(OOM_SCORE),
    # Without Ray's killer of processes that take much memory: the kernel has one.
    "RAY_memory_monitor_refresh_ms": "0",
    # On a machine at its limit Ray's agents take longer than the 30 s after which the raylet would give up. Measured.
    "RAY_agent_register_timeout_ms": "120000",
    # A machine that lost its head joins again when the head is back; a head that is started anew is another cluster. Chosen.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_DEDUP_LOGS": "0",
    "PYTHONUNBUFFERED": "1",
}
# On Linux, too, this makes Ray listen on loopback alone; an address of 127.0.0.1 does not.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


# -- in the actor's process --------------------------------------------------------------------------------------------


class ActorSettings(Struct, frozen=True, kw_only=True):
    """Lies in a file that only we can read: an actor's arguments go through Ray, and this holds the token.

    num_threads_given: OMP_NUM_THREADS as the driver found it; Ray sets it for actors.
    """

    node: NodeToStart
    host: str
    trust: Trust
    make_node: str
    num_threads_given: str | None


class NodeActor:
    """A node. Ray runs this again when the process has died."""

    def __init__(self, path: str) -> None:
        die_with_parent()
        folder = Path(path).parent
        _take_stderr(folder)
        settings = msgspec.json.decode(Path(path).read_bytes(), type=ActorSettings)
        _settle(settings)
        module, _, name = settings.make_node.partition(":")
        node = settings.node

        def make_node() -> Any:
            """Return a new node by the settings that came with this process."""
            return getattr(importlib.import_module(module), name)(node.settings)

        def load(made: Any) -> None:
            """Do the slow work of a node's start that may run beside other nodes' starts."""
            importlib.import_module(module).load(made)

        self._host = NodeHost(
            make_node,
            node.node_id,
            settings.host,
            settings.trust,
            folder=Path(node.folder),
            turns=Path(node.turns),
            load=load,
        )
        self._place = self._host.start()

    def where(self) -> bytes:
        """Return the node's `NodeAddress` as JSON."""
        return msgspec.json.encode(self._place)

    def leave(self) -> None:
        """Ask the gateway that made this actor to end it."""
        self._place = msgspec.structs.replace(self._place, is_leaving=True)

    def close(self) -> None:
        """Close the node. The driver ends the process next."""
        stop_collecting()
        self._host.close()


def _settle(settings: ActorSettings) -> None:
    """Undo settings of Ray's that do not suit a node: core dumps, threads, cores."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.environ.pop("OMP_NUM_THREADS", None)
    if settings.num_threads_given is not None:
        os.environ["OMP_NUM_THREADS"] = settings.num_threads_given
    if settings.node.cores:
        # All threads so far; a later thread inherits its maker's cores.
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), settings.node.cores)


def _take_stderr(folder: Path) -> None:
    """Send this node's log where the gateway's log goes; Ray would keep it in a file."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as there:
        there.connect(str(folder / "log"))
        _, (fd, *_), _, _ = socket.recv_fds(there, 1, 1)
        os.dup2(fd, 2)
        os.close(fd)


# -- in the driver's process -------------------------------------------------------------------------------------------


def drive(control: socket.socket, log_to: int) -> None:
    """Drive Ray until the gateway ends or says so. Does not return; the guard that started this process removes the rest of Ray.

    control: the socket to the gateway. log_to: the file descriptor that actors log to; Ray writes to this process's own standard streams.
    """
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lines = control.makefile("rb")

    def tell(news: orders.News) -> None:
        """Send news to the gateway, unless it has ended."""
        # The end of the gateway is noticed by the thread that reads its orders.
        with suppress(OSError):
            control.sendall(orders.line_of(news))

    begin = orders.order_of(lines.readline())
    assert isinstance(begin, orders.Begin)
    try:
        _lend_stderr(Path(begin.settings.folder), log_to)
        driver = _Driver(begin.settings, tell)
        asyncio.run(driver.run(lines))
    except Exception as error:
        if not isinstance(error, ClusterError):
            log.exception("Ray could not be driven")
        tell(orders.ClusterFailed(str(error) if isinstance(error, ClusterError) else _told(error)))
    # Ray's own way out takes seconds, and may hang.
    os._exit(0)


def _told(error: BaseException) -> str:
    """The last line of a text of Ray's, which is the cause's. It becomes a part of a line to the gateway, which reads no endless ones."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:MAX_PROBLEM_CHARS] if lines else type(error).__name__


def _lend_stderr(folder: Path, fd: int) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "log"))
    listener.listen()

    def lend() -> None:
        """Pass the file descriptor to each process that connects, for as long as this one lives."""
        while True:
            there, _ = listener.accept()
            with there, suppress(OSError):
                socket.send_fds(there, [b"."], [fd])

    threading.Thread(target=lend, name="log", daemon=True).start()


class _Driver:
    """Connects to Ray when it is made. Raises ClusterError, and whatever Ray raises."""

    def __init__(self, settings: ClusterSettings, tell: Callable[[orders.News], None]) -> None:
        self._settings, self._tell = settings, tell
        self._num_threads_given = os.environ.get("OMP_NUM_THREADS")
        os.environ.update(environment_of(settings, os.environ))
        self._joining: subprocess.Popen[bytes] | None = None
        import ray

        self._ray = ray
        # Where it waits for something that does not come, it may wait for ever.
        giving_up = threading.Timer(START_S, self._give_up)
        giving_up.daemon = True
        giving_up.start()
        self._raylet = self._connect()
        giving_up.cancel()
        self._handles: dict[str, Any] = {}
        self._places: dict[str, NodeAddress | None] = {}
        self._ours = {node.node_id for node in settings.nodes}
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()

    # -- Ray -----------------------------------------------------------------------------------------------------------

    def _connect(self) -> str:
        """Start Ray, or join one; returns the id of this machine's part."""
        settings = self._settings
        options: dict[str, Any] = {
            "namespace": NAMESPACE,
            "log_to_driver": False,
            "configure_logging": False,
            "_node_ip_address": settings.host,
            "_temp_dir": _folder_of_rays(settings),
        }
        if not settings.address:
            self._tell(orders.StartStage("starting Ray"))
            self._ray.init(
                address="local",
                num_cpus=0,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                **options,
            )
            return str(self._ray.get_runtime_context().get_node_id())
        self._tell(orders.StartStage(f"joining the Ray cluster at {settings.address}"))
        _check_reachable(settings.address)
        mark = f"{PREFIX}{secrets.token_hex(8)}"
        self._joining = _join(settings, mark)
        self._ray.init(address=settings.address, **options)
        return str(next(node["NodeID"] for node in self._ray.nodes() if mark in node["Resources"]))

    def _give_up(self) -> None:
        self._tell(orders.ClusterFailed(f"Ray has not started within {START_S:.0f} s"))
        os._exit(1)

    def _start(self, node: NodeToStart) -> Any:
        """An actor's handle; whether it comes up shows when it is asked something."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        path = Path(self._settings.folder) / f"{node.node_id}.json"
        settings = ActorSettings(
            node=node,
            host=self._settings.host,
            trust=self._settings.trust,
            make_node=self._settings.make_node,
            num_threads_given=self._num_threads_given,
        )
        _write_privately(path, msgspec.json.encode(settings))
        return (
            self._ray.remote(NodeActor)
            .options(
                name=PREFIX + node.node_id,
                max_restarts=-1,
                max_task_retries=0,
                max_concurrency=4,
                num_cpus=0,
                num_gpus=node.num_gpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(self._raylet, soft=False),
            )
            .remote(str(path))
        )

    # -- watching ------------------------------------------------------------------------------------------------------

    async def run(self, lines: IO[bytes]) -> None:
        """Start and watch the nodes, and carry out orders, until the gateway ends or says so."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(lines, loop), name="orders", daemon=True).start()
        self._watch_core(loop)
        for node in self._settings.nodes:
            self._do(node.node_id, self._keep(node))
        if self._settings.follows_all:
            self._do("others' nodes", self._look_for_others())
        await self._over.wait()
        await asyncio.gather(*(self._end(node_id) for node_id in list(self._ours)), return_exceptions=True)
        if self._joining is not None:
            self._joining.terminate()
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._joining.wait, CONNECT_S)

    def _read(self, lines: IO[bytes], loop: asyncio.AbstractEventLoop) -> None:
        """Read the gateway's orders until it ends. Runs on a separate thread."""
        try:
            with suppress(OSError):
                for line in lines:
                    loop.call_soon_threadsafe(self._obey, orders.order_of(line))
        finally:
            loop.call_soon_threadsafe(self._over.set)

    def _watch_core(self, loop: asyncio.AbstractEventLoop) -> None:
        """Without its raylet this process can do nothing: the gateway has all of it started again."""
        for pid in descendants(os.getpid()):
            with suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                if name in CORE_PROCESSES:
                    loop.add_reader(os.pidfd_open(pid), self._core_ended, name)

    def _core_ended(self, name: str) -> None:
        self._tell(orders.ClusterFailed(f"Ray's {name} has ended"))
        os._exit(1)

    def _do(self, node_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Have something done for one node, whose errors are its own: the other nodes of this machine go on."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._done(node_id, task))

    def _done(self, node_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an order for %s could not be carried out", node_id, exc_info=error)

    async def _keep(self, node: NodeToStart) -> None:
        """A node of ours, from now on: Ray restarts what dies, and what cannot even be made is tried again."""
        while node.node_id in self._ours:
            problem = await self._live(node)
            if node.node_id not in self._ours:
                break
            self._tell(orders.Placed(node.node_id, None, problem))
            await asyncio.sleep(PAUSE_S)
        self._tell(orders.NodeLeft(node.node_id))

    async def _live(self, node: NodeToStart) -> str:
        """One actor's life; returns what ended it."""
        try:
            self._handles[node.node_id] = self._start(node)
        except ValueError:
            return f"the cluster has a node called {node.node_id}: give another name with --node-name"
        except Exception as error:
            log.exception("%s could not be started", node.node_id)
            return _told(error)
        try:
            return await self._follow(node.node_id)
        except Exception as error:
            log.exception("%s cannot be followed; it is ended and started again", node.node_id)
            self._places[node.node_id] = None
            # Its name is free again only when it has ended.
            with suppress(Exception):
                await self._kill(node.node_id, is_final=True)
            self._handles.pop(node.node_id, None)
            return _told(error)

    async def _follow(self, node_id: str) -> str:
        """Tell a node's address whenever it changes, until the node has ended for good; returns the reason."""
        from ray.exceptions import ActorDiedError, ActorUnavailableError

        handle = self._handles[node_id]
        self._place(node_id, None)
        while True:
            try:
                place = msgspec.json.decode(await handle.where.remote(), type=NodeAddress)
                self._place(node_id, place)
                if place.is_leaving and node_id in self._ours:
                    self._do(node_id, self._end(node_id))
            except ActorUnavailableError:
                self._place(node_id, None)
            except ActorDiedError as error:
                del self._handles[node_id]
                return _told(error)
            await asyncio.sleep(LOOK_EVERY_S)

    def _place(self, node_id: str, place: NodeAddress | None) -> None:
        if node_id not in self._places or self._places[node_id] != place:
            self._places[node_id] = place
            self._tell(orders.Placed(node_id, place))

    async def _look_for_others(self) -> None:
        """Nodes that others have started."""
        while True:
            try:
                for name in await asyncio.to_thread(self._ray.util.list_named_actors):
                    await self._meet(name)
            except Exception:
                # Ray's own end is seen by its processes'.
                log.exception("others' nodes could not be looked for")
            await asyncio.sleep(2 * LOOK_EVERY_S)

    async def _meet(self, name: str) -> None:
        node_id = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and node_id not in self._handles.keys() | self._ours:
            with suppress(ValueError):  # it has ended meanwhile
                self._handles[node_id] = await asyncio.to_thread(self._ray.get_actor, name)
                self._do(node_id, self._follow_other(node_id))

    async def _follow_other(self, node_id: str) -> None:
        """Follow another gateway's node until it has ended for good. If it errs (another version, say) it is not ours to end: it is asked again."""
        problem = ""
        while node_id in self._handles:
            try:
                await self._follow(node_id)
            except Exception as error:
                if problem != (problem := _told(error)):
                    log.exception("%s, a node of others, cannot be followed", node_id)
                self._places[node_id] = None
                self._tell(orders.Placed(node_id, None, problem))
                await asyncio.sleep(PAUSE_S)
        del self._places[node_id]
        self._tell(orders.NodeLeft(node_id))

    # -- orders --------------------------------------------------------------------------------------------------------

    def _obey(self, order: orders.Order) -> None:
        match order:
            case orders.Kill(node_id=node_id):
                self._do(node_id, self._kill(node_id, is_final=False))
            case orders.Restart(node_id=node_id):
                self._do(node_id, self._restart(node_id))
            case orders.Remove(node_id=node_id) if node_id in self._ours:
                self._do(node_id, self._end(node_id))
            case orders.Remove(node_id=node_id) if node_id in self._handles:
                self._handles[node_id].leave.remote()
            case orders.Close():
                self._over.set()

    async def _restart(self, node_id: str) -> None:
        await self._close(node_id)
        await self._kill(node_id, is_final=False)

    async def _end(self, node_id: str) -> None:
        self._ours.discard(node_id)
        await self._close(node_id)
        await self._kill(node_id, is_final=True)

    async def _close(self, node_id: str) -> None:
        handle = self._handles.get(node_id)
        # A node without an address has nothing to close yet.
        if handle is not None and self._places.get(node_id) is not None:
            with suppress(TimeoutError, self._ray.exceptions.RayError):
                await asyncio.wait_for(handle.close.remote(), CLOSE_S + 1)

    async def _kill(self, node_id: str, *, is_final: bool) -> None:
        handle = self._handles.get(node_id)
        if handle is None:
            return
        if is_final or node_id not in self._ours:
            with suppress(self._ray.exceptions.RayError):
                await asyncio.to_thread(self._ray.kill, handle, no_restart=is_final)
        elif (place := self._places.get(node_id)) is not None:
            # Ray asks a process to kill itself, and a stopped process would not.
            with suppress(ProcessLookupError):
                os.kill(place.pid, signal.SIGKILL)


def _folder_of_rays(settings: ClusterSettings) -> str:
    """Return Ray's folder. Ray lets everybody write to it, so it lies in our own folder, which only we can enter."""
    return f"{settings.folder}/r"


def environment_of(settings: ClusterSettings, given: Mapping[str, str]) -> dict[str, str]:
    """Return what to set in the environment of Ray's processes. Writes Ray's token to a file that only we can read.

    given: the environment as it is. A cluster that is run by hand has its token there.
    """
    found = dict(FIXED)
    # A cluster that is there listens where it listens; with this set, Ray would not join it.
    if ipaddress.ip_address(settings.host).is_loopback and not settings.address:
        found |= LOOPBACK
    if settings.port:
        found["RAY_GCS_SERVER_PORT"] = str(settings.port)
    if not (settings.address and any(name.startswith(("RAY_AUTH_", "RAY_USE_TLS")) for name in given)):
        path = Path(settings.folder) / "token"
        path.touch(mode=0o600)
        # Ray's token tells nothing of ours.
        path.write_text(hmac.digest(settings.trust.token, b"ray", "sha256").hex())
        found |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
        # Ray's token, read on the way, would let anybody run programs on these machines.
        if cert := settings.trust.cert:
            found |= {"RAY_USE_TLS": "1", "RAY_TLS_SERVER_CERT": cert, "RAY_TLS_CA_CERT": cert}
            found |= {"RAY_TLS_SERVER_KEY": settings.trust.key}
    return found


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"ray_address: no Ray cluster can be reached at {address}: {error}. Start one there with: overture serve "
            "--cluster-host ADDRESS --cluster-port PORT, and let machines of the cluster reach each other."
        ) from error


def _join(settings: ClusterSettings, mark: str) -> subprocess.Popen[bytes]:
    """A raylet of this machine in the cluster, which ends with the process that is returned. Raises ClusterError."""
    path = Path(settings.folder) / "join"
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += ["--address", settings.address, "--node-ip-address", settings.host, "--num-cpus", "0"]
    command += ["--resources", json.dumps({mark: 1}), "--object-store-memory", str(OBJECT_STORE_BYTES)]
    command += ["--temp-dir", _folder_of_rays(settings)]
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as output:
        joining = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    deadline_s = time.monotonic() + JOIN_S
    while JOINED not in (said := path.read_text(errors="replace")):
        if joining.poll() is not None or time.monotonic() > deadline_s:
            log.error("joining the Ray cluster failed: %s", said[-2000:])
            raise ClusterError(
                f"ray_address: this machine could not join the Ray cluster at {settings.address}. The log has what Ray said; "
                "the cluster's token must be the same on all machines (--cluster-token-file), and so must Python and Ray."
            )
        time.sleep(LOOK_EVERY_S / 5)
    return joining


def _write_privately(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(content)
