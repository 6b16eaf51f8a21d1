"""Prometheus figures of the KV tiers."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.metrics.snapshots import SnapshotCollector, labelled, rows_of
from kvtiers.stats import PeerStats, TierStats

# Metric, field of host memory's figures, field of the disk's, help. Counts are blocks unless the name says otherwise.
_GAUGES = rows_of("""
overture_kv_bytes                 | bytes          | bytes            | Memory or disk space that KV occupies
overture_kv_capacity_bytes        | capacity_bytes | capacity_bytes   | Memory or disk space that KV may occupy
overture_kv_blocks                | num_blocks     | num_blocks       | KV blocks held
overture_kv_sessions              | num_sessions   |                  | Sessions with KV in host memory
overture_kv_write_queue_blocks    |                | num_unwritten    | Blocks waiting to be written
overture_kv_write_lag_seconds     |                | write_lag_s      | How long the oldest block waiting to be written has waited
overture_kv_read_queue_blocks     |                | num_reads_queued | Blocks being read or waiting to be
overture_kv_read_bytes_per_second |                | bytes_per_s      | Measured speed of recent reads; 0 before the first
""")
_COUNTERS = rows_of("""
overture_kv_hits          | num_hits          | num_hits           | KV blocks found in a tier
overture_kv_misses        | num_misses        |                    | KV blocks of prompts that were found in no tier
overture_kv_saved         | num_saved         |                    | Blocks saved
overture_kv_evicted       | num_evicted       | num_evicted        | Blocks that left to make room
overture_kv_trimmed       | num_trimmed       |                    | Blocks that lost their last layers to make room
overture_kv_carried       | num_carried       |                    | \
    Blocks that went to the device in pieces, for requests that waited for more than a quarter of host memory
overture_kv_dropped_saves | num_dropped_saves | num_skipped_writes | \
    Finished blocks that were not kept: host memory in use, or the disk too slow, full or failing
overture_kv_corrupt       |                   | num_corrupt        | Blocks whose checksum was wrong, served as misses
overture_kv_read_errors   |                   | num_read_errors    | Reads that failed
overture_kv_write_errors  |                   | num_write_errors   | Writes that failed
overture_kv_read_bytes    |                   | bytes_read         | Bytes read
overture_kv_written_bytes |                   | bytes_written      | Bytes written
""")


class KvCollector(SnapshotCollector[TierStats]):
    """Figures of KV in host memory and on disk, and of KV exchanged with other nodes."""

    def metrics_of(self, stats: TierStats) -> Iterator[Metric]:
        """Yield one metric a row of the tables above, labelled by tier, and the peers' figures where there are peers."""
        for family, rows in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, of_host, of_disk, documentation in rows:
                values = {"host": getattr(stats.host, of_host)} if of_host else {}
                values |= {"disk": getattr(stats.disk, of_disk)} if of_disk else {}
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
