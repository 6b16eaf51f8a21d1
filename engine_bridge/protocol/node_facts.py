"""What a node tells the gateway of itself, by which requests are routed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

KernelName = Literal["bgmv", "mbgmv"]


class Ranks(Struct, frozen=True, gc=False):
    """Adapter ranks of some requests: of how many, their sum, the largest. Requests for the base model count with rank 0."""

    num: int = 0
    total: int = 0
    most: int = 0

    def plus(self, rank: int) -> Ranks:
        return Ranks(self.num + 1, self.total + rank, rank if rank > self.most else self.most)

    def __add__(self, other: Ranks) -> Ranks:
        most = other.most if other.most > self.most else self.most
        return Ranks(self.num + other.num, self.total + other.total, most)


@dataclass(frozen=True, slots=True)
class PerfModel:
    """Seconds of a step over a batch, 0 of nobody.

    rank_s · (ranks as the kernel reads them) + token_s · (tokens of KV) + request_s · (requests) + fixed_s.
    BGMV pads all ranks to the largest, MBGMV does not. Source: CaraServe §5; departs in tokens and requests, which its models leave out (0 s each).
    """

    kernel: KernelName
    rank_s: float
    fixed_s: float
    token_s: float = 0.0
    request_s: float = 0.0

    def seconds(self, ranks: Ranks, num_tokens: int = 0) -> float:
        if ranks.num == 0:
            return 0.0
        read = ranks.num * ranks.most if self.kernel == "bgmv" else ranks.total
        return self.rank_s * read + self.token_s * num_tokens + self.request_s * ranks.num + self.fixed_s


class NodePerf(Struct, frozen=True, kw_only=True, gc=False):
    """How fast a node is, as it knows itself. Everything in seconds.

    decode, prefill, prompt_token_s, prefill_step_s: as in `Settings`. answer_tokens: the usual answer there. kv_token_s, kv_disk_token_s: a
    token's KV from host memory to the device, and from disk to host memory. kv_fetch_token_s: from another node's to this one's, with what computing
    costs that it often lacks; None: it cannot have it. error: mean share by which steps have differed from what was predicted lately.
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

    def kv_load_s(self, num_host_tokens: int, num_disk_tokens: int = 0) -> float:
        """Until KV that lies there is on the device."""
        num_tokens = num_host_tokens + num_disk_tokens
        return self.kv_token_s * num_tokens + self.kv_disk_token_s * num_disk_tokens


# A node that has not said anything yet. Chosen: a small GPU. All that are unknown are alike, so that only their loads decide.
UNKNOWN = NodePerf(
    decode=PerfModel("mbgmv", 0.0, 0.03, 1e-7, 1e-4),
    prefill=PerfModel("mbgmv", 0.0, 0.03, 0.0, 0.05),
    prompt_token_s=2e-4,
    answer_tokens=256.0,
)


class NodeFacts(Struct, frozen=True, kw_only=True, gc=False):
    """A node, as it last reported itself.

    running, queued: ranks of requests that have begun, and of those that have not. num_tokens: of KV that all of them hold or will take when they
    begin. queued_tokens: of the prompts of those that are queued, what has to be computed. answer_tokens: that all of them are predicted to answer
    still, None where nobody predicts it. free_tokens: of KV, that more requests could take when all of those have what they will need.
    num_urgent: requests of urgent sessions. is_open: takes requests. perf: None: as `Settings` have it for all nodes. store: nodes that name the same
    one have their host memory and disk in common; "": its own.
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
        return self.running.num + self.queued.num
