"""Nodes and gateways of a cluster know each other, and nobody else gets in."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from engine_bridge.cluster.trust import Trust, read_token
from engine_bridge.protocol.errors import ClusterError

PATIENCE_S = 10.0


def certified(folder: Path, name: str, *addresses: str) -> Trust:
    """A cluster of its own, with a certificate that it signed itself. addresses: of its machines."""
    key, subject = Ed25519PrivateKey.generate(), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    begin = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    made = x509.CertificateBuilder(
        subject, subject, key.public_key(), 1, begin, begin + datetime.timedelta(36500)
    )
    if addresses:
        named = [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
        made = made.add_extension(x509.SubjectAlternativeName(named), critical=False)
    cert_path, key_path = folder / f"{name}.crt", folder / f"{name}.key"
    cert_path.write_bytes(made.sign(key, None).public_bytes(Encoding.PEM))
    key_path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return Trust(token=b"t", cert=str(cert_path), key=str(key_path))


async def greeting(server: ssl.SSLContext | None, client: ssl.SSLContext | None) -> bytes:
    """What a client reads of a server over these."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    async with (
        asyncio.timeout(PATIENCE_S),
        await asyncio.start_server(greet, "127.0.0.1", 0, ssl=server) as listener,
    ):
        port = listener.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
        try:
            return await reader.read()
        finally:
            writer.close()


async def test_both_ends_show_the_clusters_certificate(tmp_path: Path) -> None:
    ours = certified(tmp_path, "ours")
    assert await greeting(ours.server_tls(), ours.client_tls()) == b"hello"


async def test_a_node_of_another_cluster_is_not_believed(tmp_path: Path) -> None:
    ours, theirs = certified(tmp_path, "ours"), certified(tmp_path, "theirs")
    with pytest.raises(ssl.SSLCertVerificationError):
        await greeting(theirs.server_tls(), ours.client_tls())


async def test_a_client_without_the_certificate_reads_nothing(tmp_path: Path) -> None:
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    try:
        said = await greeting(certified(tmp_path, "ours").server_tls(), anybody)
    except (ssl.SSLError, ConnectionError):
        said = b""
    assert said == b""


def test_without_a_certificate_there_is_no_tls() -> None:
    assert Trust(token=b"t").server_tls() is None


def test_files_that_are_no_certificate_are_named_with_what_makes_one(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("no certificate")
    with pytest.raises(ClusterError, match=r"cluster_cert.*openssl req"):
        Trust(token=b"t", cert=str(tmp_path / "c"), key=str(tmp_path / "c")).client_tls()


def test_a_certificate_names_the_address_of_each_machine(tmp_path: Path) -> None:
    trust = certified(tmp_path, "two", "10.0.0.1", "fd00::2")
    trust.check_name("10.0.0.1")
    trust.check_name("fd00::2")
    with pytest.raises(ClusterError, match=r"does not name 10\.0\.0\.3.*subjectAltName"):
        trust.check_name("10.0.0.3")
    with pytest.raises(ClusterError, match="does not name"):
        certified(tmp_path, "none").check_name("10.0.0.1")


def test_without_a_certificate_no_name_is_asked_for() -> None:
    Trust(token=b"t").check_name("127.0.0.1")


def test_a_missing_token_is_made_for_its_owner_only_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = read_token(path)
    assert len(token) == 64 and read_token(path) == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    read_token(path)
    path.chmod(0o640)
    with pytest.raises(ClusterError, match="chmod 600"):
        read_token(path)


def test_a_token_that_can_be_guessed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("secret\n")
    path.chmod(0o600)
    with pytest.raises(ClusterError, match="fewer than 32"):
        read_token(path)


def test_a_token_that_cannot_be_made_is_an_error_of_the_operators(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot make"):
        read_token(tmp_path / "gone" / "token")
