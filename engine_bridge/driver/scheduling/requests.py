"""vLLM's requests as the dispatcher asks for them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_bridge.driver.adapters.residency import Residency


class Requests:
    """The requests that the dispatcher knows (`core.dispatcher.Engine`), by id.

    Args:
        num_tokens: that requests may hold together.
        is_ready, num_cached_tokens: as of `Scheduling`.
        adapters: whose memory is bounded; None: requests use none.
    """

    def __init__(
        self,
        num_tokens: int,
        block_size: int,
        is_ready: Callable[[Any], bool],
        num_cached_tokens: Callable[[Any], int],
        adapters: Residency | None,
    ) -> None:
        self._by_id: dict[str, Any] = {}
        self._num_blocks, self._block_size = num_tokens // block_size, block_size
        self._is_ready, self._num_cached_tokens = is_ready, num_cached_tokens
        self._adapters = adapters

    def add(self, request: Any) -> None:
        self._by_id[request.request_id] = request

    def remove(self, request_id: str) -> None:
        """Unknown ones are ignored."""
        self._by_id.pop(request_id, None)

    def __getitem__(self, request_id: str) -> Any:
        return self._by_id[request_id]

    # -- what the dispatcher asks ------------------------------------------------------------------------------------

    def is_ready(self, request_id: str) -> bool:
        return self._is_ready(self._by_id[request_id])

    def num_tokens(self, request_id: str) -> int:
        num_tokens: int = self._by_id[request_id].num_tokens
        return num_tokens

    def start_blocks(self, request_id: str) -> int:
        # All of the prompt, as vLLM asks for it: what of it is cached and in nobody's use is among the free blocks, too.
        return min(-(-self.num_tokens(request_id) // self._block_size), self._num_blocks)

    def held_blocks(self, request_id: str) -> int:
        return self.num_tokens(request_id) // self._block_size + 1

    def num_cached_tokens(self, request_id: str) -> int:
        return self._num_cached_tokens(self._by_id[request_id])

    def missing_adapter_bytes(self, adapter_id: int) -> int:
        return self._adapters.needed_room(adapter_id) if self._adapters is not None else 0

    def adapter_bytes(self, adapter_id: int) -> int:
        return self._adapters.room_of(adapter_id) if self._adapters is not None else 0


def waits_for(request: Any) -> Hashable:
    """What it waits for before it may start: its own grammar, its adapter, or nothing."""
    if request.structured_output_request is not None:
        return request.request_id
    return request.lora_request.lora_int_id if request.lora_request is not None else None
