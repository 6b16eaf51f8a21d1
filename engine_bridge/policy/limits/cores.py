"""Which processor cores compute for which rank of an engine on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

WAITING = "OVERTURE_RANKS_WAIT"
"""The variable that says how ranks wait for one another: see `cores_of_ranks`."""


def cores_of_ranks(cores: Sequence[int], num_ranks: int, num_threads: int | None) -> dict[str, str]:
    """Return the environment in which ranks start: with equally many of these cores each, the last ones of this process.

    Where there are fewer cores than ranks, the system moves the ranks about, and each computes on one thread: more would wait for one another. Only
    where others have a core of their own, ranks may wait without giving theirs away ("spin"). It halves the time of a small model's step (9 against
    20 ms for a token, demo model, two ranks), and starves all others on a busy core. num_threads: the cores to compute on; None: all.
    """
    waiting = {WAITING: "spin" if len(cores) > num_ranks else "sleep"}
    if len(cores) < num_ranks:
        return waiting | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    of_each = max(min(num_threads or len(cores), len(cores)) // num_ranks, 1)
    used = cores[-of_each * num_ranks :]
    parts = [used[rank * of_each : (rank + 1) * of_each] for rank in range(num_ranks)]
    return waiting | {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, part)) for part in parts)}
