"""The KV tiers' figures, as Prometheus reads them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from gateway.metrics.kv import KvCollector
from kvtiers.stats import DiskTierStats, HostStats, PeerStats, TierStats


def registry(peers: PeerStats) -> CollectorRegistry:
    found = CollectorRegistry()
    stats = TierStats(host=HostStats(num_hits=3), disk=DiskTierStats(num_hits=4), peers=peers)
    found.register(KvCollector(lambda: stats))
    return found


def test_what_came_from_other_nodes_and_what_did_not_is_told_by_reason() -> None:
    peers = PeerStats(
        is_on=True, bytes_fetched=5, bytes_lent=6, num_fetched=7, num_lent=8, misses={"dead": 2}, refusals={}
    )
    told = registry(peers)
    for name, labels, value in (
        ("overture_kv_hits_total", {"tier": "disk"}, 4),
        ("overture_kv_peer_bytes_total", {"direction": "in"}, 5),
        ("overture_kv_peer_bytes_total", {"direction": "out"}, 6),
        ("overture_kv_peer_blocks_total", {"direction": "in"}, 7),
        ("overture_kv_peer_blocks_total", {"direction": "out"}, 8),
        ("overture_kv_peer_misses_total", {"reason": "dead"}, 2),
    ):
        assert told.get_sample_value(name, labels) == value, name


def test_a_node_alone_says_nothing_of_others() -> None:
    told = registry(PeerStats())
    assert told.get_sample_value("overture_kv_hits_total", {"tier": "host"}) == 3
    assert told.get_sample_value("overture_kv_peer_bytes_total", {"direction": "in"}) is None
