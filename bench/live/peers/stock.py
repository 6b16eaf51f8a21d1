"""vLLM's own engine in this process (`LLMEngine`, no server between): bare, with its disk connector, with LMCache."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import time
from typing import Any

from bench.live.peers.engine import (
    DecodeClock,
    Engine,
    Settings,
    configure_environment,
    drop_page_cache,
    greedy,
)
from bench.live.peers.play import Asked, Conversations, text

# As long as vLLM's own engine loop sleeps when a step ran nothing (v1/engine/core.py), so that whoever loads KV gets the core.
NOTHING_RAN_S = 0.001
SERVER_START_TIMEOUT_S = 90.0
SETTLE_TIMEOUT_S = 20.0


class StockEngine(Engine):
    """vLLM with its prefix cache. Statistics and detokenisation are off: its best settings here."""

    def __init__(self, settings: Settings) -> None:
        configure_environment(settings)
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.settings = settings
        arguments: dict[str, Any] = {
            "model": settings.model,
            "dtype": settings.dtype,
            "block_size": settings.block_size,
            "max_model_len": settings.max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "num_gpu_blocks_override": settings.num_blocks,
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        engine_args = EngineArgs(**(arguments | self.connector()))
        self.llm = LLMEngine.from_engine_args(engine_args, enable_multiprocessing=False)
        self._num_requests = 0
        self.turn([1] * 64, 2)

    def connector(self) -> dict[str, Any]:
        """Engine arguments that a KV connector adds."""
        return {}

    def add(self, tokens: list[int], max_tokens: int) -> None:
        self._num_requests += 1
        self.llm.add_request(f"r{self._num_requests}", {"prompt_token_ids": tokens}, greedy(max_tokens))

    def step(self) -> list[Any]:
        outputs = self.llm.step()
        if not outputs and not self.scheduler.running:
            time.sleep(NOTHING_RAN_S)
        return outputs

    def turn(self, tokens: list[int], max_tokens: int) -> dict[str, Any]:
        started_s = time.perf_counter()
        self.add(tokens, max_tokens)
        ttft_s, num_cached, answer = None, 0, []
        while self.llm.has_unfinished_requests():
            for output in self.step():
                if ttft_s is None:
                    ttft_s = time.perf_counter() - started_s
                    num_cached = output.num_cached_tokens or 0
                answer += output.outputs[0].token_ids
        return {"ttft_s": ttft_s, "token_ids": answer, "num_cached_tokens": num_cached}

    def batch(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        clock = DecodeClock(len(prompts))
        for prompt in prompts:
            self.add(prompt, max_tokens)
        while self.llm.has_unfinished_requests():
            for output in self.step():
                clock.count(output.request_id, len(output.outputs[0].token_ids))
        return clock.result()

    # -- people and agents -------------------------------------------------------------------------------------------

    def begin(self, histories: dict[str, int]) -> None:
        """First turns, of so many tokens by session, one after the other."""
        self.talk = Conversations()
        for session, num_tokens in histories.items():
            self.talk.answered(session, self.turn(self.talk.begin(session, num_tokens), 2)["token_ids"])

    def people(
        self, plan: list[dict[str, Any]], new_tokens: int, max_tokens: int, seed: str
    ) -> list[dict[str, Any]]:
        """Everybody's questions at their times; who has had an answer goes on from there."""
        self.talk.restart(seed)
        started_s = time.perf_counter()
        waiting = [(person["asks_s"][0], n) for n, person in enumerate(plan)]
        left = [list(person["asks_s"][1:]) for person in plan]
        running: dict[str, tuple[int, float, list[int], float | None, int]] = {}
        asked = []
        while waiting or running:
            now_s = time.perf_counter() - started_s
            for due_s, n in [item for item in waiting if item[0] <= now_s]:
                waiting.remove((due_s, n))
                session = plan[n]["session"]
                prompt = self.talk.ask(session, self.talk.question(session, new_tokens))
                self.add(list(prompt), max_tokens)
                running[f"r{self._num_requests}"] = n, time.perf_counter(), [], None, 0
            if not running:
                time.sleep(max(min(item[0] for item in waiting) - now_s, 0))
                continue
            for output in self.step():
                n, came_s, answer, ttft_s, cached = running[output.request_id]
                if ttft_s is None:
                    ttft_s, cached = time.perf_counter() - came_s, output.num_cached_tokens or 0
                answer += output.outputs[0].token_ids
                running[output.request_id] = n, came_s, answer, ttft_s, cached
                if output.finished:
                    del running[output.request_id]
                    session = plan[n]["session"]
                    self.talk.answered(session, answer)
                    asked.append(Asked(session, self.talk.num_turns[session], ttft_s, cached, answer))
                    if left[n]:
                        waiting.append((time.perf_counter() - started_s + left[n].pop(0), n))
        return [item.as_dict() for item in asked]

    def agents(self, stages: list[list[dict[str, Any]]], max_tokens: int) -> dict[str, Any]:
        """Stages of agents that work side by side, each stage on what the one before has said. Seconds from end to end."""
        started_s = time.perf_counter()
        said: list[int] = []
        for stage in stages:
            ids = {}
            for agent in stage:
                prompt = self.talk.ask(agent["session"], said + text(agent["new_tokens"], agent["task"]))
                self.add(list(prompt), max_tokens)
                ids[f"r{self._num_requests}"] = agent["session"]
            answers: dict[str, list[int]] = {session: [] for session in ids.values()}
            while self.llm.has_unfinished_requests():
                for output in self.step():
                    answers[ids[output.request_id]] += output.outputs[0].token_ids
            for session, answer in answers.items():
                self.talk.answered(session, answer)
            said = [token for answer in answers.values() for token in answer]
        return {"elapsed_s": time.perf_counter() - started_s, "said": said}

    def place(self, source: str) -> None:
        if source == "recompute":
            self.forget_device()
        elif source != "device":
            raise ValueError(f"no {source} here")

    def close(self) -> None:
        self.llm.engine_core.shutdown()
        del self.llm
        gc.collect()


class ExampleEngine(StockEngine):
    """vLLM's ExampleConnector: one safetensors file per prompt and layer. The only disk tier of vLLM's that runs on a CPU.

    It finds a history only if it is the prompt's whole blocks but for the last token's, and stores a prompt right only if one step
    computes it all: the caller lets both be so.
    """

    sources = ("disk", "disk_cold")

    def connector(self) -> dict[str, Any]:
        uses = connect("ExampleConnector", {"shared_storage_path": self.settings.folder})
        return uses | {"max_num_batched_tokens": self.settings.max_model_len}

    def place(self, source: str) -> None:
        self.forget_device()
        if source == "disk_cold":
            drop_page_cache(self.kv_files())


class LMCacheEngine(StockEngine):
    """LMCache's multi-process connector and its cache server: host memory, in chunks of 256 tokens (its default)."""

    sources = ("host",)

    def __init__(self, settings: Settings) -> None:
        os.environ["LMCACHE_TRACK_USAGE"] = "false"  # else it reports to its makers
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
        self._server = subprocess.Popen(
            [
                *(sys.executable, "-m", "lmcache.cli.main", "server"),
                *("--host", "127.0.0.1", "--port", str(settings.port), "--http-port", str(settings.port + 1)),
                *("--l1-size-gb", str(settings.host_gib), "--eviction-policy", "LRU"),
                *("--supported-transfer-mode", "auto"),  # the default mode hangs on a CPU
                # Without shared memory KV goes through its socket: 340 ms instead of 130 for 2,048 tokens.
                *("--shm-name", f"overture-bench-{os.getpid()}"),
                "--disable-observability",
            ],
            stdin=subprocess.DEVNULL,
        )
        try:
            wait_for_port(settings.port, self._server)
            super().__init__(settings)
        except BaseException:
            self._stop_server()
            raise

    def connector(self) -> dict[str, Any]:
        server = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.settings.port}
        return connect("LMCacheMPConnector", server)

    def settle(self) -> None:
        """Its saves are done when the scheduler has let go of the requests that they read from."""
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while self.scheduler.has_requests():
            self.step()
            if time.monotonic() > deadline_s:
                raise TimeoutError("LMCache still saves")

    def place(self, source: str) -> None:
        if source != "host":
            raise ValueError(f"no {source} here")
        self.settle()
        self.forget_device()

    def cpu_s(self) -> float:
        import psutil

        server = psutil.Process(self._server.pid).cpu_times()
        return super().cpu_s() + server.user + server.system

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._stop_server()

    def _stop_server(self) -> None:
        self._server.terminate()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


class OffloadingEngine(StockEngine):
    """vLLM's OffloadingConnector: host memory."""

    name = "OffloadingConnector"

    def connector(self) -> dict[str, Any]:
        return connect(self.name, {"cpu_bytes_to_use": int(self.settings.host_gib * (1 << 30))})


class SimpleOffloadEngine(OffloadingEngine):
    """The other one of vLLM's for host memory."""

    name = "SimpleCPUOffloadConnector"


def connect(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Engine arguments for a KV connector of vLLM's or for it."""
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=options)
    return {"kv_transfer_config": transfer, "disable_hybrid_kv_cache_manager": True}


def wait_for_port(port: int, server: subprocess.Popen[bytes]) -> None:
    """Return once the server listens. Raises if it ends or takes too long."""
    deadline_s = time.monotonic() + SERVER_START_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError("LMCache's server does not start") from None
            time.sleep(0.1)


ENGINES: dict[str, type[StockEngine]] = {
    "stock": StockEngine,
    "example": ExampleEngine,
    "lmcache": LMCacheEngine,
    "offloading": OffloadingEngine,
    "simple_offload": SimpleOffloadEngine,
}
