"""vLLM's requests in the form in which the dispatcher asks for them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_bridge.driver.adapters.residency import Residency


class Requests:
    """The requests that the dispatcher knows (`core.dispatcher.Engine`), by id.

    Args:
        num_tokens: the most tokens that requests may hold together.
        block_size: tokens in a block.
        is_ready, num_cached_tokens, block_pool: see `Scheduling`.
        adapters: the adapters whose memory is bounded; None: requests use none.
    """

    def __init__(
        self,
        num_tokens: int,
        block_size: int,
        is_ready: Callable[[Any], bool],
        num_cached_tokens: Callable[[Any], int],
        adapters: Residency | None,
        block_pool: Any = None,
    ) -> None:
        self._by_id: dict[str, Any] = {}
        self._num_blocks, self._block_size = num_tokens // block_size, block_size
        self._is_ready, self._num_cached_tokens = is_ready, num_cached_tokens
        self._adapters, self._pool = adapters, block_pool
        self.running_adapters: Collection[int] = ()
        """Ids of the running requests' adapters, as of the step that is decided. Collected once, as hundreds of waiting requests are looked at."""

    def add(self, request: Any) -> None:
        """Add a request."""
        self._by_id[request.request_id] = request

    def remove(self, request_id: str) -> None:
        """Remove a request; an unknown id is ignored."""
        self._by_id.pop(request_id, None)

    def __getitem__(self, request_id: str) -> Any:
        return self._by_id[request_id]

    # -- what the dispatcher asks ------------------------------------------------------------------------------------

    def is_ready(self, request_id: str) -> bool:
        """Return whether the request may start as far as its adapter and its grammar are concerned."""
        return self._is_ready(self._by_id[request_id])

    def num_tokens(self, request_id: str) -> int:
        """Return the request's tokens so far: its prompt's and its answer's."""
        num_tokens: int = self._by_id[request_id].num_tokens
        return num_tokens

    def start_blocks(self, request_id: str) -> int:
        """Return the number of free blocks that starting this request would take: new blocks, and cached blocks that no running request holds."""
        # vLLM counts in the same way: cached blocks of the prompt that no request uses are among the free blocks, too.
        num_blocks = min(-(-self.num_tokens(request_id) // self._block_size), self._num_blocks)
        return num_blocks - self._num_shared_blocks(request_id)

    def shared_tokens(self, request_id: str) -> int:
        """Return how many of the request's first tokens lie in blocks that running requests hold."""
        return self._num_shared_blocks(request_id) * self._block_size

    def _num_shared_blocks(self, request_id: str) -> int:
        """Return how many of the request's first blocks running requests hold.

        A request that holds a block holds all blocks before it, so the last shared block is found by halving. The block of the last token is always
        computed anew, because vLLM needs its output.
        """
        if self._pool is None:
            return 0
        request = self._by_id[request_id]
        hashes = request.block_hashes[: (request.num_tokens - 1) // self._block_size]
        return bisect_left(hashes, True, key=lambda block_hash: not self._is_held(block_hash))

    def _is_held(self, block_hash: Any) -> bool:
        cached = self._pool.get_cached_block(block_hash, [0])
        return cached is not None and cached[0].ref_cnt > 0

    def held_blocks(self, request_id: str) -> int:
        """Return how many blocks the running request holds, counted by itself."""
        return self.num_tokens(request_id) // self._block_size + 1

    def num_cached_tokens(self, request_id: str) -> int:
        """Return how many of the request's first tokens need not be computed."""
        return self._num_cached_tokens(self._by_id[request_id])

    def missing_adapter_bytes(self, adapter_id: int) -> int:
        """Return the room that the adapter would need beside the running ones; 0 where adapters are not bounded."""
        return (
            self._adapters.needed_room(adapter_id, self.running_adapters) if self._adapters is not None else 0
        )


def waits_for(request: Any) -> Hashable:
    """Return an id of the thing that a request waits for before it may start: its own grammar, its adapter, or None."""
    if request.structured_output_request is not None:
        return request.request_id
    return request.lora_request.lora_int_id if request.lora_request is not None else None
