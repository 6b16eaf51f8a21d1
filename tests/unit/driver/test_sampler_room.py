"""On a GPU vLLM keeps a request's settings in tables of fixed width, and a request that goes beyond fails the step for everybody."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState

from engine_bridge.driver.engine import building
from engine_bridge.driver.serving.sampler_room import newer_sampler_room, sampler_room_of
from engine_bridge.policy.limits.sampler_room import check_room
from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.settings.engine_config import EngineConfig


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tables of vLLM's sampler, as an engine on a GPU makes them."""
    monkeypatch.setenv("PATH", os.environ["PATH"])
    for name, value in building._of_gpu(
        EngineConfig(model="m", served_model_name="m", device="cuda")
    ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    prompts = SimpleNamespace(np=np.zeros(2, dtype=np.int32))
    state: Any = SimpleNamespace(
        device=torch.device("cpu"), max_num_reqs=2, vocab_size=100, prompt_len=prompts
    )
    config: Any = None
    return [LogitBiasState(config, state), BadWordsState(config, state)]


def asked(**settings: Any) -> SamplingParams:
    words = settings.pop("words", None)
    params = SamplingParams(**settings)
    params._bad_words_token_ids = words
    return params


def test_what_has_no_room_in_a_gpus_sampler_is_refused_and_all_else_is_not(tables: list[Any]) -> None:
    room = newer_sampler_room()
    words, tokens = room.bad_words, room.bad_word_tokens
    fits = [
        asked(),
        asked(allowed_token_ids=list(range(room.allowed_tokens))),
        asked(logit_bias=dict.fromkeys(range(room.biased_tokens), 1.0)),
        asked(stop_token_ids=list(range(room.stop_tokens)), min_tokens=1),
        asked(stop_token_ids=list(range(room.stop_tokens + 1))),  # none is kept from ending an answer
        asked(words=[[1]] * words),
        asked(words=[[1] * (tokens // 256)] * 256),
    ]
    too_much = {
        "allowed_token_ids": asked(allowed_token_ids=list(range(room.allowed_tokens + 1))),
        "logit_bias": asked(logit_bias=dict.fromkeys(range(room.biased_tokens + 1), 1.0)),
        "stop_token_ids": asked(stop_token_ids=list(range(room.stop_tokens + 1)), min_tokens=1),
        "bad_words": asked(words=[[1]] * (words + 1)),
        "bad_words: .* tokens": asked(words=[[1] * (tokens // 256 + 1)] * 256),
    }
    for params in fits:
        check_room(params, room)
        for table in tables:
            table.add_request(0, params)
    for name, params in too_much.items():
        with pytest.raises(InvalidRequest, match=name):
            check_room(params, room)
        with pytest.raises(ValueError, match="Too many"):
            for table in tables:
                table.add_request(0, params)


def test_the_usual_limit_of_bad_words_has_room_in_all_their_forms(tables: list[Any]) -> None:
    room = newer_sampler_room()
    check_room(asked(words=[[1, 2, 3, 4]] * 3 * 256), room)
    assert tables[1].bad_word_offsets.gpu.numel() <= 2 * 1025, (
        "a table of 65,537 for each request took 268 MB"
    )


def test_the_older_model_runner_has_no_such_tables() -> None:
    assert sampler_room_of(SimpleNamespace(use_v2_model_runner=False)) is None
    assert sampler_room_of(SimpleNamespace(use_v2_model_runner=True)) == newer_sampler_room()
