"""Requests as vLLM's scheduler takes them, with what our scheduling reads of them."""

from __future__ import annotations

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

from bench.emulated.vllm_parts import block_hasher, block_names
from bench.sim.core.requests import Arrival, Guesser
from engine_bridge.driver.carried import FACTS, Carried
from engine_bridge.predict.length import LengthFeatures
from engine_bridge.protocol.request_context import RequestContext


class RequestMaker:
    """A session's requests begin with the same tokens; any other has tokens of its own: nobody finds another one's prefix.

    Args:
        block_tokens: None where nobody names blocks.
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
        """Of a session's first blocks."""
        return block_names(self._number(session), 0, num_blocks)

    def make(self, arrival: Arrival, rank: int, lora: LoRARequest | None) -> Request:
        own = self._number(arrival.session or arrival.request_id)
        adapter = "" if arrival.adapter_id is None else str(arrival.adapter_id)
        context = RequestContext(tenant=arrival.tenant, adapter=adapter, priority=arrival.priority)
        facts = Carried(
            context=context,
            rank=rank,
            features=LengthFeatures(
                num_prompt_tokens=arrival.num_prompt_tokens,
                context=context,
                max_tokens=arrival.max_answer_tokens,
            ),
            guess=self._guesser.guess(arrival) if self._guesser is not None else None,
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
        if not arrival.session:
            del self._numbers[arrival.request_id]
        if self._guesser is not None:
            self._guesser.ended(arrival)
