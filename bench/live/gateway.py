"""What the gateway costs over a bare engine loop, and what an idle socket costs.

    python -m bench.live.gateway [--quick]

One process holds the engine and the gateway, as in production; clients are a process of their own. The peer is a loop of
`LLMEngine.step()` on the very same engine and thread, without metrics, and takes turns with the gateway round by round.
The last line of the output is JSON. `stream_efficiency` is the median over the rounds, `spread` its interval at 95%: single rounds differ by a tenth,
as the speed of the machine does.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import uvloop

from bench.intervals import interval
from bench.live.shared.load import prompt_of
from bench.live.shared.report import figures, last_line, options, report, spread
from bench.live.shared.rounds import in_turn
from engine_bridge.driver.engine.building import configure_environment
from engine_bridge.driver.engine.engine import VllmDriver
from gateway.app import Server, build_services, engine_config
from gateway.settings.config import DEMO_ADAPTERS_DIR, DEMO_MODEL_DIR, Config

NUM_STREAMS, NUM_TOKENS, NUM_SOCKETS = 16, 512, 5000
PROBE_S = 0.005
LOAD = "bench.live.shared.load"
AIMS = {
    "stream_efficiency": "aim ≥ 0.95",
    "idle_socket_bytes": "aim ≤ 40,960",
    "loop_stall_ms_p99": "aim ≤ 20",
}


def bare_loop(driver: VllmDriver, prompts: list[list[int]], stream_interval: int) -> float:
    """Tokens per second of a bare engine loop over `prompts`; runs on the engine thread, with vLLM's statistics off."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine: Any = driver.engine
    kept = engine.log_stats, engine.output_processor.log_stats, engine.logger_manager
    engine.log_stats, engine.output_processor.log_stats, engine.logger_manager = False, False, None
    try:
        started = time.perf_counter()
        for number, prompt in enumerate(prompts):
            params = SamplingParams(
                temperature=0,
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
                stream_interval=stream_interval,
            )
            engine.add_request(f"bare-{started}-{number}", {"prompt_token_ids": prompt}, params)
        count = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                count += len(output.outputs[0].token_ids)
        elapsed_s = time.perf_counter() - started
    finally:
        engine.log_stats, engine.output_processor.log_stats, engine.logger_manager = kept
    return count / elapsed_s


async def load(*arguments: object) -> dict[str, Any]:
    """Run clients in a process of their own; return its last line."""
    return await asyncio.to_thread(last_line, sys.executable, "-m", LOAD, *map(str, arguments))


async def probe_stalls(samples_ms: list[float]) -> None:
    """Note for ever how late the event loop runs a timer, in ms."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + PROBE_S
        await asyncio.sleep(PROBE_S)
        samples_ms.append((loop.time() - due) * 1000)


async def measure_streams(server: Server, repeats: int) -> dict[str, Any]:
    """Gateway and bare loop in turn, then the event loop's stalls under the same load."""
    rounds = iter(range(1, 1000))

    async def gateway_rate() -> float:
        """Return the tokens per second through the gateway's sockets."""
        result = await load("stream", server.port, NUM_STREAMS, NUM_TOKENS, next(rounds))
        return result["num_tokens"] / result["elapsed_s"]

    async def bare_rate() -> float:
        """Return the tokens per second of the bare engine loop."""
        node = server.services.node
        prompts = await node.run_on_engine(lambda driver: render(driver, next(rounds)))
        # The peer's best settings: it too makes an output of several tokens at a time.
        interval = node.stream_interval
        return await node.run_on_engine(lambda driver: bare_loop(driver, prompts, interval))

    ours, bare = [await gateway_rate()], [await bare_rate()]  # warm both up
    for number in range(repeats):
        for rate, into in in_turn(((gateway_rate, ours), (bare_rate, bare)), number + 1):
            into.append(await rate())
        print(
            f"  round {number + 1}/{repeats}: gateway {ours[-1]:.0f}, bare {bare[-1]:.0f} tokens/s",
            flush=True,
        )
    stalls_ms: list[float] = []
    # Alone, because waking the loop 200 times a second is itself a load.
    probe = asyncio.create_task(probe_stalls(stalls_ms))
    await gateway_rate()
    probe.cancel()
    ratios = [mine / peer for mine, peer in zip(ours[1:], bare[1:], strict=True)]
    return {
        "loop_stall_ms_p99": statistics.quantiles(stalls_ms, n=100)[98],
        "gateway_tokens_per_s": ours[1:],
        "bare_tokens_per_s": bare[1:],
        "ratios": ratios,
    }


def render(driver: VllmDriver, round_number: int) -> list[list[int]]:
    """The prompts of one round as token ids, as the gateway's own turns would have them."""
    tokenizer: Any = driver.engine.renderer.tokenizer
    turns = ([{"role": "user", "content": prompt_of(n, round_number)}] for n in range(NUM_STREAMS))
    return [
        list(tokenizer.apply_chat_template(t, add_generation_prompt=True, return_dict=False)) for t in turns
    ]


async def measure_idle_sockets(server: Server) -> dict[str, Any]:
    """Resident memory that NUM_SOCKETS silent chat sockets add to this process, per socket."""
    process = psutil.Process()
    await load("idle", server.port, 50)  # stdin is closed: opens, closes, and warms the path up
    gc.collect()
    before = process.memory_info().rss
    holder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", LOAD, "idle", str(server.port), str(NUM_SOCKETS)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert holder.stdout is not None and holder.stdin is not None
    opened = json.loads(await holder.stdout.readline())["num_sockets"]
    gc.collect()
    after = process.memory_info().rss
    holder.stdin.close()
    await holder.wait()
    return {"idle_socket_bytes": (after - before) / opened, "num_sockets": opened}


async def bench(quick: bool) -> None:
    """Measure streams and idle sockets, and report."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            model=str(DEMO_MODEL_DIR),
            adapters_dir=DEMO_ADAPTERS_DIR,
            port=0,
            data_dir=Path(folder),
            drain_timeout_s=5,
        )
        print("starting the engine …", flush=True)
        services = await build_services(config)
        async with Server(services) as server:
            await services.node.start()
            streams = await measure_streams(server, 5 if quick else 31)
            print("opening idle sockets …", flush=True)
            sockets = await measure_idle_sockets(server)
    show(streams, sockets)


def show(streams: dict[str, Any], sockets: dict[str, Any]) -> None:
    """Print the report."""
    ratios = streams["ratios"]
    result = {
        "stream_efficiency": round(statistics.median(ratios), 3),
        "idle_socket_bytes": round(sockets["idle_socket_bytes"]),
        "loop_stall_ms_p99": round(streams["loop_stall_ms_p99"], 2),
    }
    rows = [
        (f"{name}, {NUM_STREAMS} streams", spread(streams[name]), "")
        for name in ("gateway_tokens_per_s", "bare_tokens_per_s", "ratios")
    ]
    rows += figures(result, AIMS)
    extra = {"spread": {"stream_efficiency": interval(ratios)}}
    report("gateway", rows, result | extra | {"num_sockets": sockets["num_sockets"]})


def main() -> None:
    """Run the bench from the command line."""
    args = options(__doc__, quick="fewer repeats, within 3 minutes").parse_args()
    logging.basicConfig(level=logging.WARNING)
    config = Config(model=str(DEMO_MODEL_DIR))
    configure_environment(engine_config(config))
    uvloop.run(bench(args.quick))


if __name__ == "__main__":
    main()
