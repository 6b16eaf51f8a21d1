"""Everything at once, for as long as one likes: clients that come, go, lag, lie and flood, while engine, disk, adapters and server break.

    python -m bench.live.robustness.soak [--minutes N] [--seed N]

A server process with the demo model, keys and a small disk of its own (a tmpfs, where this user may mount one). First every greedy answer is taken
down, one at a time. Then rounds: clients work, and one thing is broken in the middle of each round; after it the clients leave, and what the server
still holds is read: memory, open files, threads. The second round ends in `kill -9` and a new start. Readings count from the end of the
warm-up, which is the first third of what follows the new start and includes one engine that was killed: the first engine built in another's place
leaves its mark in the allocator once.

What goes on growing for some minutes is oneDNN's cache of primitives, one for each shape of a batch, up to 1,024: measured over five
rounds, what was left after free memory had gone back grew by 54 MiB, with ONEDNN_PRIMITIVE_CACHE_CAPACITY=8 by 17, and an engine that was killed and
rebuilt in between added none. Pools of threads fill up one thread at a time, too.

The last line is JSON. `lost_turns`: accepted or finished turns that REST does not give back as they were. `wrong_answers`: of all that were read
(cut off ones must be a beginning), those that differ from their reference. `status_5xx`: statuses of 5xx and error frames that nothing
explains; 503 of a killed engine, a restart or a full disk, and 429 are in `apart`, by code. `rss_growth`, `fd_growth`, `thread_growth`:
the last third of the readings against the first, medians; `rss_mib_per_kill`: the memory's growth over the engines killed between.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import chain, cycle
from pathlib import Path

from bench.live.robustness.soak.ledger import Ledger, Reading, growth
from bench.live.robustness.soak.server import Disk, Server
from bench.live.robustness.soak.traffic import GaveUp, Outage, Traffic, World, learn_references, read_back
from bench.live.shared.report import Progress, figures, options, report
from bench.live.shared.serving import ServerFailed
from overture_client.chat_frames import ChatError

KEYS = (
    "ov-soak-first-key-for-the-bench",
    "ov-soak-second-key-for-the-bench",
    "ov-soak-third-key-for-the-bench",
)
FLOOD_KEY = "ov-soak-flood-key-for-the-bench"
NUM_CLIENTS = 6
MIN_ROUND_S, MAX_ROUND_S, MIN_ROUNDS = 8.0, 30.0, 12
FULL_DISK_S, HOLD_S = 20.0, 2.0
AIMS = {
    "lost_turns": "aim 0",
    "wrong_answers": "aim 0",
    "status_5xx": "aim 0",
    "rss_growth": "aim ≤ 0.03",
    "fd_growth": "aim 0",
    "thread_growth": "aim 0",
    "engine_kills_survived": "aim ≥ 3",
}


class Soak(Progress):
    """One run."""

    def __init__(self, server: Server, world: World, seed: int) -> None:
        super().__init__()
        self.server = server
        self.world = world
        self.seed = seed
        self.readings: list[Reading] = []
        self.num_engine_kills = 0
        self.num_changes = 0

    async def run(self, minutes: float) -> None:
        """Play rounds for this long, then read every acknowledged turn back. Raises ServerFailed."""
        self.say("starting the server …")
        await self.server.start()
        await learn_references(self.world)
        self.say(f"{len(self.world.references)} answers taken down")
        ends_s = time.monotonic() + minutes * 60
        round_s = min(max(minutes * 60 / MIN_ROUNDS, MIN_ROUND_S), MAX_ROUND_S)
        first = (self.nothing, self.restart, self.engine, self.nothing)
        after_warm_up = (self.engine, self.adapter, self.disk, self.engine, self.adapter, self.nothing)
        for number, breakage in enumerate(chain(first, cycle(after_warm_up))):
            if number >= len(first) and time.monotonic() > ends_s:
                break
            await self.round(number, round_s, breakage)
        await self.check_all()

    async def round(self, number: int, seconds: float, breakage: Callable[[], Awaitable[str]]) -> None:
        """Let clients work for `seconds`, break one thing in the middle, and read what the server holds at rest."""
        ends_s = time.monotonic() + seconds
        clients = [
            asyncio.create_task(self.client(ends_s, random.Random(f"{self.seed}-{number}-{n}")))
            for n in range(NUM_CLIENTS)
        ]
        await asyncio.sleep(seconds / 3)
        what = await breakage()
        await asyncio.gather(*clients)
        self.readings.append(reading := await self.server.at_rest())
        if number % 4 == 3 or breakage == self.restart:
            await self.check_all()
        ledger = self.world.ledger
        self.say(
            f"round {number + 1} ({what}): {ledger.num_turns} turns, {len(ledger.lost)} lost, {len(ledger.wrong)} wrong of "
            f"{ledger.num_answers_checked}, {len(ledger.unexpected)} unexpected errors; at rest {reading.rss_mib:.0f} MiB, "
            f"{reading.num_fds} files, {reading.num_threads} threads"
        )

    async def client(self, ends_s: float, chance: random.Random) -> None:
        """Visit the server again and again until `ends_s`, in seconds of the monotonic clock."""
        traffic = Traffic(self.world, chance)
        while time.monotonic() < ends_s:
            try:
                await traffic.visit()
            except (GaveUp, ChatError) as error:
                self.world.ledger.unexpected.append(str(error))

    async def check_all(self) -> None:
        """Read every acknowledged turn back."""
        for key, session_id in list(self.world.ledger.sessions):
            try:
                turns = await read_back(self.world, key, session_id)
            except Outage as error:
                self.world.ledger.unexpected.append(f"reading a session back: {error}")
                continue
            self.world.ledger.check_session(key, session_id, turns)

    # -- what breaks -------------------------------------------------------------------------------------------------

    async def nothing(self) -> str:
        """Break nothing."""
        return "calm"

    async def engine(self) -> str:
        """Kill the engine and wait for the new one."""
        await self.server.break_engine()
        self.num_engine_kills += 1
        return "engine killed and rebuilt"

    async def restart(self) -> str:
        """Kill the server and start it again. Readings from before do not count."""
        self.readings.clear()
        await self.server.kill_and_restart()
        return "kill -9 and a new start"

    async def adapter(self) -> str:
        """Replace an adapter's files twice."""
        for _ in range(2):
            self.num_changes += 1
            await asyncio.to_thread(self.server.replace_adapter, self.num_changes)
            await asyncio.sleep(0.5)
        return "adapter replaced twice"

    async def disk(self) -> str:
        """Fill the disk until the server refuses to store, then empty it."""
        if not self.server.disk.can_be_filled:
            return "no disk that could be filled"
        refused_before = self.world.ledger.apart["overloaded"]
        await self.server.fill_disk(self.until_refused)
        num_refused = self.world.ledger.apart["overloaded"] - refused_before
        return f"disk full and back, {num_refused} refusals"

    async def until_refused(self) -> None:
        """Store until the server says that it cannot, and a little longer. The log that SQLite writes ahead has room for a while."""
        traffic = Traffic(self.world, random.Random(self.seed))
        deadline = time.monotonic() + FULL_DISK_S
        status = 0
        while status != 503 and time.monotonic() < deadline:
            status, _ = await traffic.call("POST", "/api/sessions", {"title": "x" * 200}, KEYS[0])
        await asyncio.sleep(HOLD_S)
        await self.check_all()  # stored turns can be read while the disk is full


async def bench(minutes: float, seed: int) -> bool:
    """Run the soak; return whether every promise was kept."""
    ledger = Ledger()
    with tempfile.TemporaryDirectory(prefix="overture-soak-") as name:
        folder = Path(name)
        disk = Disk(folder / "data")
        if not disk.can_be_filled:
            print("no file system can be mounted here: the part with the full disk is left out", flush=True)
        server = Server(folder, disk, (*KEYS, FLOOD_KEY), ledger)
        soak = Soak(server, World(server.port, KEYS, FLOOD_KEY, ledger), seed)
        try:
            await soak.run(minutes)
        finally:
            server.close()
            disk.close()
    return show(soak, minutes)


def show(soak: Soak, minutes: float) -> bool:
    """Print all of it; whether every promise was kept."""
    ledger = soak.world.ledger
    warm = soak.readings[max(len(soak.readings) // 3, 2) :]
    for title, lines in (("lost", ledger.lost), ("wrong", ledger.wrong), ("unexpected", ledger.unexpected)):
        for line in list(lines)[:10]:
            print(f"  {title}: {line}")
    print("  visits:", dict(soak.world.counts))
    result = {
        "lost_turns": len(ledger.lost),
        "wrong_answers": len(ledger.wrong),
        "status_5xx": len(ledger.unexpected),
        "engine_kills_survived": soak.num_engine_kills,
        "turns": ledger.num_turns,
        "answers_checked": ledger.num_answers_checked,
        "server_kills": soak.server.num_lives - 1,
        "has_filled_the_disk": soak.server.disk.can_be_filled,
        "apart": dict(ledger.apart),
        "rss_mib": [round(reading.rss_mib, 1) for reading in soak.readings],
        "minutes": minutes,
    } | growth(warm)
    shown = (*AIMS, "turns", "answers_checked", "rss_mib_per_kill")
    report("soak", figures({name: result[name] for name in shown}, AIMS), result)
    return not (ledger.lost or ledger.wrong or ledger.unexpected)


def main() -> None:
    """Run the bench from the command line; exit with 1 if a promise was broken."""
    parser = options(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the rounds take together")
    parser.add_argument("--seed", type=int, default=1, help="of everything that clients choose")
    args = parser.parse_args()
    try:
        is_good = asyncio.run(bench(args.minutes, args.seed))
    except ServerFailed as error:
        print(json.dumps({"error": str(error)}))
        sys.exit(1)
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
