"""What Ray's processes are told by their environment."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from engine_bridge.cluster.orders import ClusterSettings
from engine_bridge.cluster.ray_settings import environment_of
from engine_bridge.cluster.trust import Trust

TRUST = Trust(token=b"of this cluster")
TLS = Trust(token=b"of this cluster", cert="c.crt", key="c.key")


def environment(folder: Path, given: dict[str, str] | None = None, **settings: Any) -> dict[str, str]:
    made: dict[str, Any] = {"address": "", "host": "127.0.0.1", "folder": str(folder), "trust": TRUST}
    made |= {"nodes": (), "make_node": ""}
    return environment_of(ClusterSettings(**made | settings), given or {})


def test_a_ray_of_our_own_listens_on_loopback_alone(tmp_path: Path) -> None:
    assert environment(tmp_path)["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in environment(tmp_path, host="10.0.0.1")


def test_rays_token_is_in_a_file_of_its_owner_and_tells_nothing_of_ours(tmp_path: Path) -> None:
    path = Path(environment(tmp_path)["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    token = path.read_text()
    assert len(token) == 64 and TRUST.token.decode() not in token and TRUST.token.hex() not in token
    other = tmp_path / "b"
    other.mkdir()
    assert Path(environment(other)["RAY_AUTH_TOKEN_PATH"]).read_text() == token, "on all machines the same"


@pytest.mark.parametrize("given", ["RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS"])
def test_a_cluster_that_others_run_keeps_their_token_and_certificate(tmp_path: Path, given: str) -> None:
    found = environment(tmp_path, {given: "1"}, address="10.0.0.1:6379", host="10.0.0.2", trust=TLS)
    assert not {name for name in found if name.startswith(("RAY_AUTH_", "RAY_USE_TLS", "RAY_TLS"))}


def test_beyond_this_machine_ray_speaks_tls_with_the_clusters_certificate(tmp_path: Path) -> None:
    found = environment(tmp_path, host="10.0.0.1", port=6379, trust=TLS)
    assert (found["RAY_USE_TLS"], found["RAY_TLS_SERVER_CERT"], found["RAY_TLS_CA_CERT"]) == (
        "1",
        "c.crt",
        "c.crt",
    )
    assert found["RAY_GCS_SERVER_PORT"] == "6379"
    assert "RAY_USE_TLS" not in environment(tmp_path)
