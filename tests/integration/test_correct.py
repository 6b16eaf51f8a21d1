"""The short form of `python -m bench.live.correct`: one family of models through all tiers, adapters, batches, conversations and a restart.

Its servers run in the tests' process, before the shared engine starts (conftest): that a server is a process is nothing to what it answers.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from bench.live.correct.__main__ import main
from bench.live.correct.asking import Asker, session
from gateway import cli
from gateway.settings.sources import load_config

from .conftest import served
from .facts import Patch


@asynccontextmanager
async def in_this_process(_: Path, flags: Sequence[str]) -> AsyncIterator[Asker]:
    given = cli.serve.make_context("serve", ["--port=0", *flags]).params
    config = load_config(
        {name: value for name, value in given.items() if name not in ("config_file", "named_model")}
    )
    async with served(config) as server, session(server.url) as http:
        await server.services.node.start()
        yield Asker(http, os.getpid())


@pytest.mark.slow
def test_answers_are_those_of_transformers_whatever_was_reused(
    monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["correct", "--quick"])
    num_threads = torch.get_num_threads()
    try:
        main(in_this_process)
    finally:
        torch.set_num_threads(num_threads)
    said = capsys.readouterr()
    found = json.loads(said.out.splitlines()[-1])
    assert found["cases"] >= 25, said.err
    assert found["notices_a_wrong_block"]
    names = ("wrong_tokens", "stale_kv_used", "without_evidence", "failed_plays")
    assert {name: found[name] for name in names} == dict.fromkeys(names, 0)
