import asyncio
import ssl
import stat
from pathlib import Path

import pytest

from engine_bridge.cluster.trust import Trust, read_token
from engine_bridge.protocol.errors import ClusterError
from tests.unit.cluster.catalog_node import PATIENCE_S
from tests.unit.cluster.certificates import certified


async def greeting(server: ssl.SSLContext | None, client: ssl.SSLContext | None) -> bytes:
    """What a client reads of a server over these."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    listening = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=server)
    async with asyncio.timeout(PATIENCE_S), listening as listener:
        port = listener.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
        try:
            return await reader.read()
        finally:
            writer.close()


async def test_both_ends_show_the_clusters_certificate_and_take_no_other(tmp_path: Path) -> None:
    ours, theirs = certified(tmp_path, "ours"), certified(tmp_path, "theirs")
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    assert await greeting(ours.server_tls(), ours.client_tls()) == b"hello"
    with pytest.raises(ssl.SSLCertVerificationError):
        await greeting(theirs.server_tls(), ours.client_tls())
    try:
        said = await greeting(ours.server_tls(), anybody)
    except (ssl.SSLError, ConnectionError):
        said = b""
    assert said == b"", "a client without a certificate reads nothing"


def test_a_certificate_names_each_machine_and_without_one_there_is_no_tls(tmp_path: Path) -> None:
    trust = certified(tmp_path, "two", "10.0.0.1", "fd00::2")
    trust.check_name("10.0.0.1")
    trust.check_name("fd00::2")
    with pytest.raises(ClusterError, match=r"does not name 10\.0\.0\.3.*subjectAltName"):
        trust.check_name("10.0.0.3")
    with pytest.raises(ClusterError, match="does not name"):
        certified(tmp_path, "none").check_name("10.0.0.1")
    plain = Trust(token=b"t")
    plain.check_name("127.0.0.1")
    assert plain.server_tls() is plain.client_tls() is None
    (tmp_path / "c").write_text("no certificate")
    with pytest.raises(ClusterError, match=r"cluster_cert.*openssl req"):
        Trust(token=b"t", cert=str(tmp_path / "c"), key=str(tmp_path / "c")).client_tls()


def test_a_missing_token_is_made_and_one_that_is_not_safe_is_refused(tmp_path: Path) -> None:
    path, short = tmp_path / "token", tmp_path / "short"
    token = read_token(path)
    assert len(token) == 64 and read_token(path) == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    short.write_text("secret\n")
    short.chmod(0o600)
    gone = tmp_path / "gone" / "token"
    for bad, reason in ((path, "chmod 600"), (short, "fewer than 32"), (gone, "cannot make")):
        with pytest.raises(ClusterError, match=reason):
            read_token(bad)
