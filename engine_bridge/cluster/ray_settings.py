"""The environment that Ray's processes get. All of it must be set before ray is imported; children take it over. Does not import ray."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from pathlib import Path

from engine_bridge.cluster.orders import ClusterSettings
from engine_bridge.cluster.trust import Trust

OOM_SCORE = 500  # as `child` has it: a node goes before the gateway
FIXED = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_worker_oom_score_adjustment": str(OOM_SCORE),
    # The kernel has one of its own.
    "RAY_memory_monitor_refresh_ms": "0",
    # On a machine at its limit Ray's agents take longer than the 30 s after which the raylet would give up. Measured.
    "RAY_agent_register_timeout_ms": "120000",
    # A machine whose head has gone joins again when that is back; a head that is started anew is another cluster. Chosen.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_DEDUP_LOGS": "0",
    "PYTHONUNBUFFERED": "1",
}
# On Linux, too, this makes Ray listen on loopback alone; an address of 127.0.0.1 does not.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def environment_of(settings: ClusterSettings, given: Mapping[str, str]) -> dict[str, str]:
    """Writes Ray's token to a file that only we can read. given: the environment as it is; who runs a cluster by hand has set its token there."""
    found = dict(FIXED)
    # A cluster that is there listens where it listens; with this set, Ray would not join it.
    if is_loopback(settings.host) and not settings.address:
        found |= LOOPBACK
    if settings.port:
        found["RAY_GCS_SERVER_PORT"] = str(settings.port)
    if not (settings.address and any(name.startswith(("RAY_AUTH_", "RAY_USE_TLS")) for name in given)):
        path = Path(settings.folder) / "token"
        path.touch(mode=0o600)
        # Whoever has Ray's token learns nothing of ours.
        path.write_text(hmac.digest(settings.trust.token, b"ray", "sha256").hex())
        found |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
        found |= _tls_of(settings.trust)
    return found


def _tls_of(trust: Trust) -> dict[str, str]:
    """Whoever reads Ray's token on its way may run what they like on these machines."""
    if not trust.cert:
        return {}
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": trust.cert,
        "RAY_TLS_SERVER_KEY": trust.key,
        "RAY_TLS_CA_CERT": trust.cert,
    }


def is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback
