"""What the gateway costs over a bare engine loop, and what an idle socket costs.

    python -m bench.live.gateway [--quick]

One process holds the engine and the gateway, as in production; clients are a process of their own. The peer is a loop of
`LLMEngine.step()` on the very same engine and thread, without metrics, and takes turns with the gateway round by round.
The last line of the output is JSON.
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

from bench.live.load import prompt_of
from bench.live.report import last_line, options, report, spread
from engine_bridge.driver.engine.building import configure_environment
from engine_bridge.driver.engine.engine import VllmDriver
from gateway.app import Server, build_services, engine_config
from gateway.settings.config import DEMO_ADAPTERS_DIR, DEMO_MODEL_DIR, Config

NUM_STREAMS = 16
PROBE_S = 0.005
AIMS = {
    "stream_efficiency": "aim ≥ 0.95",
    "idle_socket_bytes": "aim ≤ 40,960",
    "loop_stall_ms_p99": "aim ≤ 20",
}


def bare_loop(driver: VllmDriver, prompts: list[list[int]], num_tokens: int, stream_interval: int) -> float:
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
                max_tokens=num_tokens,
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


async def run(module: str, *arguments: object) -> dict[str, Any]:
    """The last line of another bench, which runs in a process of its own."""
    return await asyncio.to_thread(last_line, sys.executable, "-m", module, *map(str, arguments))


async def probe_stalls(samples_ms: list[float]) -> None:
    """Note for ever how late the event loop runs a timer, in ms."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + PROBE_S
        await asyncio.sleep(PROBE_S)
        samples_ms.append((loop.time() - due) * 1000)


async def measure_streams(server: Server, repeats: int, num_tokens: int) -> dict[str, Any]:
    """Gateway and bare loop in turn, then the event loop's stalls under the same load."""
    rounds = iter(range(1, 1000))

    async def gateway_rate() -> float:
        arguments = ("--streams", NUM_STREAMS, "--tokens", num_tokens, "--round", next(rounds))
        result = await run("bench.live.load", "stream", server.port, *arguments)
        return result["num_tokens"] / result["elapsed_s"]

    async def bare_rate() -> float:
        node = server.services.node
        prompts = await node.run_on_engine(lambda driver: render(driver, next(rounds)))
        # The peer's best settings: it too makes an output of several tokens at a time.
        interval = node.stream_interval
        return await node.run_on_engine(lambda driver: bare_loop(driver, prompts, num_tokens, interval))

    ours, bare = [await gateway_rate()], [await bare_rate()]  # warm both up
    for number in range(repeats):
        # Whoever goes second in a round went first in the one before: a drift of the machine hits both.
        for rate, into in ((gateway_rate, ours), (bare_rate, bare))[:: 1 if number % 2 else -1]:
            into.append(await rate())
        print(
            f"  round {number + 1}/{repeats}: gateway {ours[-1]:.0f}, bare {bare[-1]:.0f} tokens/s",
            flush=True,
        )
    stalls_ms: list[float] = []
    # By itself: waking the loop 200 times a second is a load of its own.
    probe = asyncio.create_task(probe_stalls(stalls_ms))
    await gateway_rate()
    probe.cancel()
    ratios = [mine / peer for mine, peer in zip(ours[1:], bare[1:], strict=True)]
    return {
        "stream_efficiency": statistics.median(ratios),
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


async def measure_idle_sockets(server: Server, num_sockets: int) -> dict[str, Any]:
    """Resident memory that `num_sockets` silent chat sockets add to this process, per socket."""
    process = psutil.Process()
    await run(
        "bench.live.load", "idle", server.port, "--sockets", 50
    )  # stdin is closed: opens, closes, and warms the path up
    gc.collect()
    before = process.memory_info().rss
    holder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.live.load", "idle", str(server.port), "--sockets", str(num_sockets)),
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
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    repeats, num_tokens = (5, 512) if quick else (11, 512)
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
            streams = await measure_streams(server, repeats, num_tokens)
            print("opening idle sockets …", flush=True)
            sockets = await measure_idle_sockets(server, 5000)
    print("measuring the LoRA wrappers …", flush=True)
    lora = await run("bench.live.lora", *(["--quick"] if quick else []))
    show(streams, sockets, lora)


def show(streams: dict[str, Any], sockets: dict[str, Any], lora: dict[str, Any]) -> None:
    keys = ("mixed_batch_identical", "lora_decode_ratio", "lora_prefill_ratio")
    result = {
        "stream_efficiency": round(streams["stream_efficiency"], 3),
        "idle_socket_bytes": round(sockets["idle_socket_bytes"]),
        "loop_stall_ms_p99": round(streams["loop_stall_ms_p99"], 2),
        **{key: lora[key] for key in keys},
        "spread": {"stream_efficiency": [round(edge(streams["ratios"]), 2) for edge in (min, max)]},
    }
    report(
        "gateway",
        [
            ("bare engine loop, 16 streams, tokens/s", spread(streams["bare_tokens_per_s"]), ""),
            ("gateway, 16 chat sockets, tokens/s", spread(streams["gateway_tokens_per_s"]), ""),
            ("gateway ÷ bare", spread(streams["ratios"]), AIMS["stream_efficiency"]),
            ("event loop stall p99, ms", f"{result['loop_stall_ms_p99']}", AIMS["loop_stall_ms_p99"]),
            (
                f"memory per idle socket at {sockets['num_sockets']}, bytes",
                f"{result['idle_socket_bytes']}",
                AIMS["idle_socket_bytes"],
            ),
            (
                "5 adapters + base in one batch = single runs",
                f"{result['mixed_batch_identical']}",
                "aim true",
            ),
            (
                "LoRA decode step, ours ÷ vLLM's wrapper, time",
                f"{result['lora_decode_ratio']}",
                "smaller is better",
            ),
            (
                "LoRA 64-token prefill, ours ÷ vLLM's wrapper, time",
                f"{result['lora_prefill_ratio']}",
                "smaller is better",
            ),
        ],
        result,
    )


def main() -> None:
    args = options(__doc__, quick="fewer repeats, within 3 minutes").parse_args()
    logging.basicConfig(level=logging.WARNING)
    config = Config(model=str(DEMO_MODEL_DIR))
    configure_environment(engine_config(config))
    uvloop.run(bench(args.quick))


if __name__ == "__main__":
    main()
