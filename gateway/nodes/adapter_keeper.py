"""The adapters of one node, kept as the gateway's list says.

Adapters that the node lacks are sent and loaded, adapters that it should not have are unloaded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import msgspec
from msgspec import Struct

from engine_bridge.adapters.errors import AdapterRejected, RegistryFailed, status_of
from engine_bridge.adapters.retries import AdapterRefusal
from engine_bridge.cluster.remote_node import RemoteNode
from engine_bridge.cluster.sending import bring
from engine_bridge.policy.adapters.adapter_places import LoadAdapter, Pin, Served, Step, Unload, steps
from engine_bridge.protocol.api_errors import error_body
from engine_bridge.protocol.errors import BridgeError, EngineUnavailable
from engine_bridge.protocol.node import JsonReply
from gateway.nodes.wanted_adapters import WantedAdapter

log = logging.getLogger(__name__)

# The time until a failed step is tried again, unless the connection failed. Chosen: a disk may be full, or an adapter may not fit.
RETRY_S = 10.0
# How often a node is told again which files it must not delete. Chosen: well within the time for which its store keeps files anyway.
KEEP_EVERY_S = 60.0


class FailedStep(Struct, frozen=True):
    """A step that did not work. version: "" where the adapter should not be there. at_s: on the loop's clock."""

    version: str
    reason: str
    at_s: float


class Keeper:
    """The keeper of one node's adapters, from its joining to its leaving, over all of its restarts.

    Args:
        node_id: the node's name.
        node: the node.
        wanted: returns the adapters that nodes should serve now, by name.

    Attributes:
        failures: why the node does not serve an adapter, by the adapter's name.
    """

    def __init__(
        self, node_id: str, node: RemoteNode, wanted: Callable[[], Mapping[str, WantedAdapter]]
    ) -> None:
        self.node_id, self.node = node_id, node
        self._wanted = wanted
        self._lock = asyncio.Lock()
        self._incarnation = ""
        self._has_caught_up = False
        self._kept_s = float("-inf")
        self._compared = (-1, -1)
        self.failures: dict[str, FailedStep] = {}

    @property
    def is_open(self) -> bool:
        """Whether the node is connected and ready."""
        return self.node.is_up and self.node.progress.state == "ready"

    @property
    def is_in_step(self) -> bool:
        """Whether the node serves all adapters that it should, apart from `failures`."""
        return self._has_caught_up and self.is_open and self.node.incarnation == self._incarnation

    def needs_work(self, num_changes: int) -> bool:
        """Return whether `catch_up` would do something now.

        Args:
            num_changes: how often the list of wanted adapters has changed; the lists are compared only when one of them has changed.
        """
        if not self.is_open or self._lock.locked():
            return False
        self._look()
        if not self.is_in_step or _now() - self._kept_s > KEEP_EVERY_S:
            return True
        state = (num_changes, self.node.num_adapter_reports)
        if state == self._compared and not self.failures:
            return False
        self._compared = state
        return bool(self._todo())

    async def catch_up(self, *, is_list_whole: bool = True) -> None:
        """Bring the node in step with the list. Returns when it is, or when the node's connection has ended.

        Args:
            is_list_whole: whether the list is complete; until then no files are deleted.
        """
        async with self._lock:
            self._look()
            try:
                if self.is_open and is_list_whole:
                    await self._keep_files()
                while self.is_open and (todo := self._todo()):
                    for step in todo:
                        await self._take(step)
            except EngineUnavailable as error:
                log.info("the adapters of %s wait until it is back: %s", self.node_id, error)
                self._has_caught_up = False
            else:
                self._has_caught_up = self.is_open

    async def load(self, name: str) -> JsonReply | None:
        """Serve the wanted version of a name. Returns None if the node's connection ended meanwhile; errors are in the reply and in `failures`."""
        async with self._lock:
            try:
                return await self._load(name)
            except EngineUnavailable:
                return None

    # -- the adapters that are served, and that should be --------------------------------------------------------------

    def _look(self) -> None:
        if self.node.incarnation != self._incarnation:
            self._incarnation, self._has_caught_up = self.node.incarnation, False
            self._kept_s = float("-inf")
            self.failures.clear()

    def _there(self) -> dict[str, Served]:
        """Return the adapters that the node serves by its last report; a report comes with the reply to each step."""
        infos = self.node.adapters_by_name().values()
        return {info.name: Served(info.version, info.is_pinned) for info in infos}

    def _todo(self) -> list[Step]:
        wanted = {name: each.served for name, each in self._wanted().items()}
        self.failures = {
            name: failed
            for name, failed in self.failures.items()
            if failed.version == _version(wanted.get(name)) and _now() - failed.at_s < RETRY_S
        }
        return [step for step in steps(wanted, self._there()) if step.name not in self.failures]

    # -- steps ---------------------------------------------------------------------------------------------------------

    async def _take(self, step: Step) -> None:
        """Carry out one step. Raises EngineUnavailable."""
        wanted = self._wanted().get(step.name)
        if isinstance(step, LoadAdapter):
            if wanted is not None:
                await self._load(step.name)
            return
        problem = "the node did not do it"
        try:
            if isinstance(step, Pin):
                await self.node.pin_adapter(step.name, step.is_pinned)
            else:
                reply = await self.node.unload_adapter({"lora_name": step.name})
                problem = refusal_of(reply).reason if reply.status >= 400 else problem
        except EngineUnavailable:
            raise
        except BridgeError as error:
            problem = str(error)
        there = self._there().get(step.name)
        is_done = (
            there is None if isinstance(step, Unload) else there is None or there.is_pinned == step.is_pinned
        )
        if not is_done:
            self._failed(step.name, _version(wanted.served if wanted is not None else None), problem)

    async def _load(self, name: str) -> JsonReply:
        """Send and load an adapter. Raises EngineUnavailable."""
        wanted = self._wanted()[name]
        version = wanted.served.version
        try:
            path = await bring(self.node, wanted.sent)
            body = {**wanted.options, "lora_name": name, "lora_path": path, "load_inplace": True}
            reply = await self.node.load_adapter(body)
        except EngineUnavailable:
            raise
        except BridgeError as error:
            reply = refused(error)
        if reply.status < 400 and _version(self._there().get(name)) != version:
            reply = refused(
                AdapterRejected("The adapter's files changed while they were loaded.", code="changed")
            )
        if reply.status >= 400:
            self._failed(name, version, refusal_of(reply).reason)
        else:
            self.failures.pop(name, None)
        return reply

    def _failed(self, name: str, version: str, reason: str) -> None:
        log.error("%s cannot do what it should with the adapter %r: %s", self.node_id, name, reason)
        self.failures[name] = FailedStep(version, reason, _now())

    async def _keep_files(self) -> None:
        if _now() - self._kept_s > KEEP_EVERY_S:
            hashes = sorted({wanted.contents.content_hash for wanted in self._wanted().values()})
            await self.node.store("keep", hashes)
            self._kept_s = _now()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _version(served: Served | None) -> str:
    return served.version if served is not None else ""


# -- replies as a node makes them --------------------------------------------------------------------------------------


def refused(error: BridgeError) -> JsonReply:
    """Return the reply with which a node itself would refuse this adapter."""
    status, code = 500, str(getattr(error, "code", ""))
    if isinstance(error, AdapterRejected | RegistryFailed):
        status, code = status_of(error)
    return JsonReply(status, msgspec.json.encode(error_body(status, str(error), code=code)))


def refusal_of(reply: JsonReply) -> AdapterRefusal:
    """Return the refusal in an error's reply."""
    try:
        error = msgspec.json.decode(reply.body)["error"]
        return AdapterRefusal(str(error["message"]), str(error.get("code") or ""))
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
        return AdapterRefusal(f"status {reply.status}")
