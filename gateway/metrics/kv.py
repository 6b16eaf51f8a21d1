"""Prometheus figures of the KV tiers."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.metrics.snapshots import SnapshotCollector, labelled
from kvtiers.stats import PeerStats, TierStats

# (metric, help, {tier: field}); counts are blocks unless the name says otherwise.
_GAUGES = (
    (
        "overture_kv_bytes",
        "Memory or disk space that KV occupies",
        {"host": "bytes", "disk": "bytes"},
    ),
    (
        "overture_kv_capacity_bytes",
        "Memory or disk space that KV may occupy",
        {"host": "capacity_bytes", "disk": "capacity_bytes"},
    ),
    ("overture_kv_blocks", "KV blocks held", {"host": "num_blocks", "disk": "num_blocks"}),
    ("overture_kv_sessions", "Sessions with KV in host memory", {"host": "num_sessions"}),
    ("overture_kv_write_queue_blocks", "Blocks waiting to be written", {"disk": "num_unwritten"}),
    (
        "overture_kv_write_lag_seconds",
        "How long the oldest block waiting to be written has waited",
        {"disk": "write_lag_s"},
    ),
    ("overture_kv_read_queue_blocks", "Blocks being read or waiting to be", {"disk": "num_reads_queued"}),
    (
        "overture_kv_read_bytes_per_second",
        "Measured speed of recent reads; 0 before the first",
        {"disk": "bytes_per_s"},
    ),
)
_COUNTERS = (
    ("overture_kv_hits", "KV blocks found in a tier", {"host": "num_hits", "disk": "num_hits"}),
    ("overture_kv_misses", "KV blocks of prompts that were found in no tier", {"host": "num_misses"}),
    ("overture_kv_saved", "Blocks saved", {"host": "num_saved"}),
    ("overture_kv_evicted", "Blocks that left to make room", {"host": "num_evicted", "disk": "num_evicted"}),
    ("overture_kv_trimmed", "Blocks that lost their last layers to make room", {"host": "num_trimmed"}),
    (
        "overture_kv_carried",
        "Blocks that went to the device in pieces, for requests that waited for more than a quarter of host memory",
        {"host": "num_carried"},
    ),
    (
        "overture_kv_dropped_saves",
        "Finished blocks that were not kept: host memory in use, or the disk too slow, full or failing",
        {"host": "num_dropped_saves", "disk": "num_skipped_writes"},
    ),
    ("overture_kv_corrupt", "Blocks whose checksum was wrong, served as misses", {"disk": "num_corrupt"}),
    ("overture_kv_read_errors", "Reads that failed", {"disk": "num_read_errors"}),
    ("overture_kv_write_errors", "Writes that failed", {"disk": "num_write_errors"}),
    ("overture_kv_read_bytes", "Bytes read", {"disk": "bytes_read"}),
    ("overture_kv_written_bytes", "Bytes written", {"disk": "bytes_written"}),
)


class KvCollector(SnapshotCollector[TierStats]):
    """Figures of KV in host memory and on disk, and of KV exchanged with other nodes."""

    def metrics_of(self, stats: TierStats) -> Iterator[Metric]:
        """Yield one metric a row of the tables above, labelled by tier, and the peers' figures where there are peers."""
        tiers = {"host": stats.host, "disk": stats.disk}
        for family, rows in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, documentation, fields in rows:
                values = {tier: getattr(tiers[tier], field) for tier, field in fields.items()}
                yield labelled(family, name, documentation, ["tier"], values)
        if stats.peers.is_on:
            yield from _peer_metrics(stats.peers)


def _peer_metrics(peers: PeerStats) -> Iterator[Metric]:
    for name, documentation, label, values in (
        (
            "overture_kv_peer_bytes",
            "KV received from other nodes or sent to them",
            "direction",
            {"in": peers.bytes_fetched, "out": peers.bytes_lent},
        ),
        (
            "overture_kv_peer_blocks",
            "KV blocks received whole from other nodes or sent to them",
            "direction",
            {"in": peers.num_fetched, "out": peers.num_lent},
        ),
        (
            "overture_kv_peer_misses",
            "Fetches from other nodes that returned nothing, or less than was offered",
            "reason",
            peers.misses,
        ),
        ("overture_kv_peer_refusals", "Fetches by other nodes that were cut off", "reason", peers.refusals),
    ):
        yield labelled(CounterMetricFamily, name, documentation, [label], values)
    yield GaugeMetricFamily(
        "overture_kv_peer_bytes_per_second",
        "Measured speed of the last answer; 0 before the first",
        peers.bytes_per_s,
    )
