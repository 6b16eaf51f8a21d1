"""A gateway with the demo model whose event loop is watched; started by benches that attack it.

Prints `ready PORT`, then answers each line on stdin with a line of JSON: the worst stall of its event loop since the last such line, and the most
that the loop's thread computed between two looks at the clock, in ms, the process's memory and open files. Ends when stdin does.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import psutil
import uvloop

from bench.live.gateway import PROBE_S, probe_stalls
from bench.live.report import options
from engine_bridge.driver.engine.building import configure_environment
from gateway.app import Server, build_services, engine_config
from gateway.settings import logs
from gateway.settings.config import DEMO_ADAPTERS_DIR, DEMO_MODEL_DIR, Config


async def probe_work(samples_ms: list[float]) -> None:
    """Note for ever what the event loop's own thread computes while a timer runs, in ms: of a stall, what is not for want of a core or of
    Python's lock."""
    while True:
        began_s = time.thread_time()
        await asyncio.sleep(PROBE_S)
        samples_ms.append((time.thread_time() - began_s) * 1000)


async def watch(config: Config) -> None:
    stalls_ms: list[float] = []
    work_ms: list[float] = []
    process = psutil.Process()
    services = await build_services(config)
    async with Server(services) as server:
        await services.node.start()
        probes = [asyncio.create_task(probe_stalls(stalls_ms)), asyncio.create_task(probe_work(work_ms))]
        print(f"ready {server.port}", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            facts = {
                "worst_stall_ms": round(max(stalls_ms, default=0.0), 1),
                "worst_work_ms": round(max(work_ms, default=0.0), 1),
                "rss_bytes": process.memory_info().rss,
                "num_fds": process.num_fds(),
            }
            stalls_ms.clear()
            work_ms.clear()
            print(json.dumps(facts), flush=True)
        for probe in probes:
            probe.cancel()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--key-file", type=Path, required=True, help="keys that clients may use")
    args = parser.parse_args()
    config = Config(
        model=str(DEMO_MODEL_DIR),
        adapters_dir=DEMO_ADAPTERS_DIR,
        data_dir=args.data_dir,
        port=0,
        api_key_file=args.key_file,
        kv_host_gib=0.25,
        kv_disk_gib=0.5,
        drain_timeout_s=2,
        draft_prefill=True,
        allow_adapter_loading=True,
        log_level="warning",
    )
    logs.setup(config.log_format, config.log_level)
    configure_environment(engine_config(config))
    uvloop.run(watch(config))


if __name__ == "__main__":
    main()
