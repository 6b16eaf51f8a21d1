"""Requests as vLLM's scheduler takes them, with what our scheduling reads of them."""

from __future__ import annotations

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

from bench.emulated.core.arrivals import Arrival, Guesser
from bench.emulated.core.vllm_parts import block_hasher, block_names
from engine_bridge.driver.carried import FACTS
from engine_bridge.protocol.engine_request import EngineRequest


class RequestMaker:
    """Makes vLLM's requests. Requests of one session begin with the same tokens; any other request has tokens that no other prompt shares.

    Args:
        block_tokens: None where blocks have no names.
    """

    def __init__(self, block_tokens: int | None, guesser: Guesser | None) -> None:
        self._hasher = block_hasher(block_tokens) if block_tokens is not None else None
        self._guesser = guesser
        self._numbers: dict[str, int] = {}
        self._num_made = 0

    def _number(self, name: str) -> int:
        self._num_made += 1
        return self._numbers.setdefault(name, self._num_made)

    def names(self, session: str, num_blocks: int) -> list[BlockHash]:
        """Return the names of a session's first blocks."""
        return block_names(self._number(session), 0, num_blocks)

    def make(self, arrival: Arrival, rank: int, lora: LoRARequest | None) -> Request:
        """Return vLLM's request for an arrival."""
        own = self._number(arrival.session or arrival.request_id)
        adapter = "" if arrival.adapter_id is None else str(arrival.adapter_id)
        facts = EngineRequest(
            tenant=arrival.tenant,
            session_id=arrival.session if arrival.turn else "",
            turn=arrival.turn,
            caller=arrival.caller,
            adapter=adapter,
            priority=arrival.priority,
            rank=rank,
            num_prompt_tokens=arrival.num_prompt_tokens,
            max_tokens=arrival.max_answer_tokens,
            guess=self._guesser(arrival) if self._guesser is not None else None,
        )
        return Request(
            request_id=arrival.request_id,
            prompt_token_ids=[own] * arrival.num_prompt_tokens,
            sampling_params=SamplingParams(
                max_tokens=arrival.num_answer_tokens, ignore_eos=True, extra_args={FACTS: facts}
            ),
            pooling_params=None,
            arrival_time=arrival.at_s,
            priority=arrival.priority,
            lora_request=lora,
            session_id=arrival.session or None,
            block_hasher=self._hasher,
        )

    def ended(self, arrival: Arrival) -> None:
        """Forget a request."""
        if not arrival.session:
            del self._numbers[arrival.request_id]
