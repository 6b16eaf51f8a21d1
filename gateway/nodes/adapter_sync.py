"""The adapters of several nodes behind one gateway: the gateway has one list, and every node serves all of it.

Clients load, unload and pin for all nodes. An adapter is loaded by all nodes that are in step, or by none: a version that one of them cannot have is
taken back from the others, and the client is told why. A node that comes later, or comes back, is brought up to date by itself; an adapter that it
cannot have is in its `failures`, tried again now and then, and served by the other nodes meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine_bridge.adapters.errors import AdapterRejected, RegistryFailed
from engine_bridge.adapters.follower import WATCH_EVERY_S, FolderFollower
from engine_bridge.adapters.retries import AdapterRefusal
from engine_bridge.cluster.remote_node import RemoteNode
from engine_bridge.policy.adapters import adapter_places
from engine_bridge.policy.adapters.adapter_places import AdapterAt
from engine_bridge.protocol.errors import EngineUnavailable
from engine_bridge.protocol.node import AdapterInfo, JsonReply
from gateway.nodes.adapter_keeper import Keeper, refusal_of, refused
from gateway.nodes.wanted_adapters import WantedAdapter, WantedAdapters

log = logging.getLogger(__name__)

# How often nodes are looked at that may lack adapters. Chosen: until then a node that came back is not asked for these adapters.
LOOK_EVERY_S = 0.5
# As often as nodes report; with a thousand adapters on two nodes it takes 5 ms (measured), and each request asks for the list.
MERGE_EVERY_S = 0.25


class AdapterSync:
    """The adapters of one gateway's nodes. All methods are called from one event loop.

    Args:
        nodes: returns the present nodes, by name.
        state_dir: where the list's registry is kept; None: in memory.
        folder: a folder whose adapters are served, now and as they come, change and go.
        given: (name, path) of other adapters that are served from the start.
    """

    def __init__(
        self,
        nodes: Callable[[], Mapping[str, RemoteNode]],
        state_dir: Path | None = None,
        folder: Path | None = None,
        given: Iterable[tuple[str, str]] = (),
    ) -> None:
        self._nodes = nodes
        self._list = WantedAdapters(state_dir)
        self._follower = FolderFollower(self, folder, given)
        self._is_started = False
        self._keepers: dict[str, Keeper] = {}
        self._pending: dict[str, WantedAdapter] = {}
        """Adapters that are being loaded on all nodes; they enter the list when that has worked."""
        self._changing = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._merged: tuple[object, list[AdapterInfo], float] = (None, [], 0.0)

    async def start(self) -> None:
        """Serve the list and the folder on all nodes that are ready; an adapter that fails is left out. Raises RegistryFailed."""
        await asyncio.to_thread(self._list.open)
        self._is_started = True
        await self._catch_up(self._open())
        await self._follower.start()
        self._looking = asyncio.create_task(self._look_after(), name="adapters of all nodes")

    async def close(self) -> None:
        """End all work on the nodes' adapters, and close the list."""
        tasks = [*self._tasks, *([self._looking] if self._looking is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._is_started:
            await asyncio.to_thread(self._list.close)

    # -- what clients see ----------------------------------------------------------------------------------------------

    def merged(self) -> list[AdapterInfo]:
        """Return the list, and where each adapter is, at most MERGE_EVERY_S old, also while no node is connected. From any thread."""
        nodes = {node_id: node for node_id, node in self._nodes().items() if node.is_up}
        state = (self._list.num_changes, list(nodes))
        before, infos, until_s = self._merged
        now = time.monotonic()
        if before != state or now > until_s:
            served = {node_id: node.adapters_by_name() for node_id, node in nodes.items()}
            infos = adapter_places.merged(self._list.infos(), served)
            self._merged = (state, infos, now + MERGE_EVERY_S)
        return list(infos)

    def find(self, name: str) -> AdapterAt | None:
        """Return which nodes can serve an adapter, and how soon; None for an adapter that is not in the list."""
        wanted = self._list.wanted.get(name)
        if wanted is None:
            return None
        nodes = (
            (node_id, node.adapters_by_name(), adapter_places.rates_of(node.figures().adapter_stats))
            for node_id, node in self._nodes().items()
            if node.is_up
        )
        return AdapterAt(wanted.contents.rank, adapter_places.loads(name, wanted.served.version, nodes))

    def failures(self, node_id: str) -> dict[str, str]:
        """Return why this node does not serve an adapter as it should, by the adapter's name."""
        keeper = self._keepers.get(node_id)
        return {name: failed.reason for name, failed in keeper.failures.items()} if keeper is not None else {}

    # -- nodes ---------------------------------------------------------------------------------------------------------

    async def joined(self, node_id: str) -> None:
        """Bring a node in step that is ready, the first time or again. Returns at once where it is in step already."""
        keeper = self._all().get(node_id)
        if keeper is not None and keeper.is_open:
            await keeper.catch_up(is_list_whole=self._looking is not None)

    def _all(self) -> dict[str, Keeper]:
        nodes = self._nodes()
        kept = {
            node_id: keeper for node_id, keeper in self._keepers.items() if nodes.get(node_id) is keeper.node
        }
        self._keepers = {
            node_id: kept.get(node_id) or Keeper(node_id, node, self._wanted)
            for node_id, node in nodes.items()
        }
        return self._keepers

    def _wanted(self) -> dict[str, WantedAdapter]:
        return {**self._list.wanted, **self._pending}

    def _open(self) -> list[Keeper]:
        return [keeper for keeper in self._all().values() if keeper.is_open]

    def _following(self) -> list[Keeper]:
        """Return the keepers of nodes that are in step. Changes do not wait for other nodes, which may be receiving gigabytes."""
        return [keeper for keeper in self._all().values() if keeper.is_in_step]

    def _in_step(self) -> list[Keeper]:
        """Return the keepers of nodes that are in step. Raises EngineUnavailable if there are none."""
        keepers = self._following()
        if not keepers:
            raise EngineUnavailable("no node is ready yet; try again in a moment", code="starting")
        return keepers

    async def _catch_up(self, keepers: Iterable[Keeper]) -> None:
        is_whole = self._looking is not None
        await asyncio.gather(*(keeper.catch_up(is_list_whole=is_whole) for keeper in keepers))

    # -- changes for all -----------------------------------------------------------------------------------------------

    async def load(self, body: Any) -> JsonReply:
        """Load an adapter on all nodes that are in step, or on none.

        Args:
            body: a body of vLLM's `/v1/load_lora_adapter`, whose path is on this machine.

        Raises:
            EngineUnavailable: while no node is in step.
        """
        async with self._changing:
            keepers = self._in_step()
            name, path = _text(body, "lora_name"), _text(body, "lora_path")
            # A node's own reply is best for a bad body, and for an adapter that it has already.
            if not name or not path:
                return await keepers[0].node.load_adapter(body)
            has_it = (keeper for keeper in keepers if name in keeper.node.adapters_by_name())
            if not body.get("load_inplace") and (keeper := next(has_it, None)) is not None:
                return await keeper.node.load_adapter(body)
            reply = await self._serve(name, path, body)
        if reply is None:
            raise EngineUnavailable("the nodes have failed and are started again; try again in a moment")
        return reply

    async def unload(self, body: Any) -> JsonReply:
        """Unload an adapter on all nodes. Raises EngineUnavailable while no node is in step."""
        async with self._changing:
            keepers = self._in_step()
            name = _text(body, "lora_name")
            if name not in self._list.wanted:
                return await keepers[0].node.unload_adapter(body)
            try:
                await self._drop(name)
            except RegistryFailed as error:
                return refused(error)
        return _done(f"Success: LoRA adapter '{name}' removed successfully.")

    async def pin(self, name: str, is_pinned: bool) -> AdapterInfo | None:
        """Keep an adapter in memory on all nodes, or no longer. Returns None for a name that is not in the list. Raises RegistryFailed."""
        async with self._changing:
            if name not in self._list.wanted:
                return None
            await asyncio.to_thread(self._list.set_pinned, name, is_pinned)
            await self._catch_up(self._following())
        return next((info for info in self.merged() if info.name == name), None)

    async def _drop(self, name: str, *, is_missing: bool = False) -> None:
        """Take an adapter off the list and off the nodes. Raises RegistryFailed."""
        await asyncio.to_thread(lambda: self._list.remove(name, is_missing=is_missing))
        await self._catch_up(self._following())

    async def _serve(self, name: str, path: str, options: Mapping[str, Any]) -> JsonReply | None:
        """Load an adapter on all nodes that are in step, and put it into the list if that worked. Returns None if all connections ended."""
        try:
            wanted = await asyncio.to_thread(self._list.read, name, path, options)
        except (AdapterRejected, RegistryFailed) as error:
            return refused(error)
        keepers = self._following()
        self._pending[name] = wanted
        try:
            replies = await asyncio.gather(*(keeper.load(name) for keeper in keepers))
            reply = _common(dict(zip((keeper.node_id for keeper in keepers), replies, strict=True)))
            if reply is not None and reply.status < 400:
                await asyncio.to_thread(self._list.add, wanted)
        except RegistryFailed as error:
            reply = refused(error)
        finally:
            del self._pending[name]
        # The nodes take over the old version's pin; or, where loading failed, the old version.
        await self._catch_up(keepers)
        return reply

    # -- adapters of the folder, which come and go ---------------------------------------------------------------------

    def served_paths(self) -> dict[str, str]:
        """See `adapters.follower.Server`."""
        return {name: str(wanted.contents.path) for name, wanted in self._list.wanted.items()}

    def unloaded_paths(self) -> dict[str, str]:
        """See `adapters.follower.Server`."""
        return self._list.unloaded

    async def serve_found(self, name: str, path: str) -> AdapterRefusal | None:
        """See `adapters.follower.Server`."""
        async with self._changing:
            if self.served_paths().get(name, path) != path:
                return AdapterRefusal("An adapter of this name was loaded from elsewhere.", "name_taken")
            reply = await self._serve(name, path, {})
        if reply is None:
            return AdapterRefusal("No node is there.", "no_node")
        return refusal_of(reply) if reply.status >= 400 else None

    async def drop_found(self, name: str, path: str) -> None:
        """See `adapters.follower.Server`."""
        async with self._changing:
            if self.served_paths().get(name) == path:
                await self._drop(name, is_missing=True)

    def problems(self) -> dict[str, str]:
        """Return why adapters of the folder, or adapters named at the start, are not served as their files are, by name. From any thread."""
        return self._follower.problems()

    async def _look_after(self) -> None:
        loop = asyncio.get_running_loop()
        followed_s = loop.time()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                for keeper in self._all().values():
                    if keeper.needs_work(self._list.num_changes):
                        self._begin(keeper)
                if loop.time() - followed_s >= WATCH_EVERY_S:
                    followed_s = loop.time()
                    await self._follower.follow()
            except Exception:
                log.exception("looking after the adapters failed; it is tried again")

    def _begin(self, keeper: Keeper) -> None:
        task = asyncio.create_task(self._bring_up(keeper))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _bring_up(keeper: Keeper) -> None:
        try:
            await keeper.catch_up()
        except Exception:
            log.exception(
                "the adapters of %s could not be brought up to date; it is tried again", keeper.node_id
            )


def _text(body: Any, field: str) -> str:
    value = body.get(field) if isinstance(body, dict) else None
    return value if isinstance(value, str) else ""


def _done(text: str) -> JsonReply:
    return JsonReply(200, msgspec.json.encode({"status": text}))


def _common(replies: Mapping[str, JsonReply | None]) -> JsonReply | None:
    """Return what a client is told of several nodes' replies: the first error, or the first success; None if there is no reply."""
    there = {node_id: reply for node_id, reply in replies.items() if reply is not None}
    failed = {node_id: reply for node_id, reply in there.items() if reply.status >= 400}
    if not failed:
        return next(iter(there.values()), None)
    node_id, reply = next(iter(failed.items()))
    if len(failed) == len(there):
        return reply
    error = msgspec.json.decode(reply.body)
    error["error"]["message"] += f" ({node_id} cannot load it; so no node serves it.)"
    return JsonReply(reply.status, msgspec.json.encode(error))
