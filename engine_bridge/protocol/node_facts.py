"""The facts that a node reports, by which requests are routed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

KernelName = Literal["bgmv", "mbgmv"]


class Ranks(Struct, frozen=True, gc=False):
    """Adapter ranks of some requests: the number of requests, the sum and the largest of the ranks. Requests for the base model count with rank 0."""

    num: int = 0
    total: int = 0
    most: int = 0

    def plus(self, rank: int) -> Ranks:
        """Return these ranks and one more."""
        return Ranks(self.num + 1, self.total + rank, rank if rank > self.most else self.most)

    def __add__(self, other: Ranks) -> Ranks:
        most = other.most if other.most > self.most else self.most
        return Ranks(self.num + other.num, self.total + other.total, most)


@dataclass(frozen=True, slots=True)
class PerfModel:
    """Seconds of a step over a batch; 0 of an empty batch.

    rank_s · (ranks as the kernel reads them) + token_s · (tokens of KV) + request_s · (requests) + fixed_s.
    BGMV pads all ranks to the largest, MBGMV does not. Source: CaraServe §5; departs in tokens and requests, which its models leave out (0 s each).
    """

    kernel: KernelName
    rank_s: float
    fixed_s: float
    token_s: float = 0.0
    request_s: float = 0.0

    def seconds(self, ranks: Ranks, num_tokens: int = 0) -> float:
        """Return the seconds of a step over these ranks and tokens of KV."""
        if ranks.num == 0:
            return 0.0
        read = ranks.num * ranks.most if self.kernel == "bgmv" else ranks.total
        return self.rank_s * read + self.token_s * num_tokens + self.request_s * ranks.num + self.fixed_s


class NodePerf(Struct, frozen=True, kw_only=True, gc=False):
    """How fast a node is, by its own measurements. Everything in seconds.

    Attributes:
        decode, prefill, prompt_token_s, prefill_step_s: as in `Settings`.
        answer_tokens: the usual length of an answer there, in tokens.
        kv_token_s: a token's KV from host memory to the device.
        kv_disk_token_s: a token's KV from disk to host memory.
        kv_fetch_token_s: a token's KV from another node to this one, with the cost of computing KV that the other node often lacks; None: it cannot
            fetch.
        error: mean share by which steps have differed lately from their predictions.
    """

    decode: PerfModel
    prefill: PerfModel
    prompt_token_s: float
    answer_tokens: float
    prefill_step_s: float = 0.0
    kv_token_s: float = 0.0
    kv_disk_token_s: float = 0.0
    kv_fetch_token_s: float | None = None
    error: float = 0.0

    def kv_load_s(self, num_tokens: int) -> float:
        """Return the seconds until KV in host memory is on the device."""
        return self.kv_token_s * num_tokens


# A node that has not reported yet. Chosen: a small GPU. All unknown nodes are alike, so that only their loads decide.
UNKNOWN = NodePerf(
    decode=PerfModel("mbgmv", 0.0, 0.03, 1e-7, 1e-4),
    prefill=PerfModel("mbgmv", 0.0, 0.03, 0.0, 0.05),
    prompt_token_s=2e-4,
    answer_tokens=256.0,
)


class NodeFacts(Struct, frozen=True, kw_only=True, gc=False):
    """A node's load, as it last reported it.

    Attributes:
        running: ranks of requests that have begun.
        queued: ranks of requests that have not begun.
        num_tokens: tokens of KV that all of these requests hold, or will take when they begin.
        queued_tokens: prompt tokens of queued requests that have to be computed.
        answer_tokens: tokens that all of these requests are predicted to answer still; None without predictions.
        free_tokens: tokens of KV that more requests could take once all of these requests have all that they will need.
        perf: None: as `Settings` have it for all nodes.
        store: nodes that name the same store share their host memory and disk; "": the node shares them with no other.
    """

    node_id: str
    running: Ranks
    queued: Ranks
    num_tokens: int
    queued_tokens: int
    free_tokens: int
    answer_tokens: int | None = None
    num_urgent: int = 0
    is_open: bool = True
    perf: NodePerf | None = None
    store: str = ""

    @property
    def num_requests(self) -> int:
        """Number of requests, running and queued."""
        return self.running.num + self.queued.num
