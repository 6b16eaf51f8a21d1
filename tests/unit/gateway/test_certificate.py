"""A TLS certificate that is renewed while the server runs."""

import asyncio
import errno
import os
import pty
import shutil
import socket
import ssl
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from engine_bridge.cluster.trust import Trust
from gateway.doors.http.certificate import Certificate
from gateway.errors import StartupError
from tests.unit.cluster.certificates import certified

from .conftest import Gateways
from .parts import until


async def test_a_renewed_certificate_is_used_from_then_on(
    gateways: Gateways, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who renews it writes two files, one after the other. Connections that are open stay."""
    monkeypatch.setattr("gateway.doors.http.certificate.LOOK_EVERY_S", 0.02)
    caplog.set_level("INFO")
    old, new, used = (certified(tmp_path, name, "127.0.0.1") for name in ("old", "new", "used"))
    shutil.copy(old.cert, used.cert)
    shutil.copy(old.key, used.key)
    gateway = await gateways(ssl_certfile=Path(used.cert), ssl_keyfile=Path(used.key))

    def trusting(trust: Trust) -> aiohttp.ClientSession:
        known = ssl.create_default_context(cafile=trust.cert)
        return aiohttp.ClientSession(gateway.server.url, connector=aiohttp.TCPConnector(ssl=known, limit=1))

    async def is_well(session: aiohttp.ClientSession) -> bool:
        async with session.get("/healthz") as reply:
            await reply.read()
            return reply.status == 200

    async with trusting(old) as open_before:
        assert await is_well(open_before)
        shutil.copy(new.key, used.key)
        await until(lambda: "goes on with the one that it has" in caplog.text)
        async with trusting(old) as another:
            assert await is_well(another)
        shutil.copy(new.cert, used.cert)
        await until(lambda: "certificate was read again" in caplog.text)
        async with trusting(new) as another:
            assert await is_well(another)
        async with trusting(old) as another:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await is_well(another)
        assert await is_well(open_before)


def test_files_that_could_not_be_read_once_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They had not changed since, so a server that had no file left to open at that moment kept the old certificate for ever."""
    used, new = certified(tmp_path, "used", "127.0.0.1"), certified(tmp_path, "new", "127.0.0.1")
    certificate = Certificate(Path(used.cert), Path(used.key))
    shutil.copy(new.cert, used.cert)
    shutil.copy(new.key, used.key)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(ssl.SSLContext, "load_cert_chain", fails)
        with pytest.raises(StartupError, match="Too many open files"):
            certificate.look()
    assert certificate.look() and not certificate.look()


def test_a_chain_in_the_wrong_order_is_said(tmp_path: Path) -> None:
    own, issuer = certified(tmp_path, "own", "127.0.0.1"), certified(tmp_path, "issuer")
    chain = tmp_path / "chain.crt"
    chain.write_bytes(Path(issuer.cert).read_bytes() + Path(own.cert).read_bytes())
    with pytest.raises(StartupError, match="not the first of its chain"):
        Certificate(chain, Path(own.key))


def in_one_file(trust: Trust) -> Path:
    """A file with its certificate and its key."""
    path = Path(trust.cert).with_suffix(".pem")
    path.write_bytes(Path(trust.cert).read_bytes() + Path(trust.key).read_bytes())
    return path


async def test_clients_show_a_certificate_of_a_known_signer_where_all_must(
    gateways: Gateways, tmp_path: Path
) -> None:
    """As with `vllm serve --ssl-ca-certs FILE --ssl-cert-reqs 2`; one file may hold the server's certificate and its key."""
    server, client, other = (certified(tmp_path, name, "127.0.0.1") for name in ("server", "client", "other"))
    gateway = await gateways(
        ssl_certfile=in_one_file(server),
        ssl_ca_certs=Path(client.cert),
        ssl_cert_reqs=2,
        ssl_ciphers="ECDHE+AESGCM",
    )
    for shown, is_let_in in ((client, True), (other, False), (None, False)):
        known = ssl.create_default_context(cafile=server.cert)
        if shown is not None:
            known.load_cert_chain(shown.cert, shown.key)
        connector = aiohttp.TCPConnector(ssl=known)
        async with aiohttp.ClientSession(gateway.server.url, connector=connector) as session:
            try:
                async with session.get("/healthz") as reply:
                    assert is_let_in and reply.status == 200
            except aiohttp.ClientError:
                assert not is_let_in


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_signer_that_is_taken_away_lets_nobody_in_any_more(
    tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """Neither by a certificate nor by a session of before, which no certificate is shown for."""
    server, client, other = (certified(tmp_path, name, "127.0.0.1") for name in ("server", "client", "other"))
    signers = Path(shutil.copy(client.cert, tmp_path / "signers"))
    certificate = Certificate(Path(server.cert), Path(server.key), ca_certs=signers, cert_reqs=2)
    known = ssl.create_default_context(cafile=server.cert)
    known.minimum_version = known.maximum_version = version
    known.load_cert_chain(client.cert, client.key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=certificate.context)
    address = listening.sockets[0].getsockname()

    def ask(session: ssl.SSLSession | None = None) -> tuple[bytes, ssl.SSLSession | None]:
        with (
            socket.create_connection(address) as raw,
            known.wrap_socket(raw, server_hostname="127.0.0.1", session=session) as connection,
        ):
            connection.sendall(b"well\n")
            return connection.recv(9), connection.session

    async with listening:
        said, before = await asyncio.to_thread(ask)
        assert said == b"well\n" and (await asyncio.to_thread(ask, before))[0] == said
        shutil.copy(other.cert, signers)
        assert certificate.look()
        for session in (before, None):
            with suppress(OSError):
                assert not (await asyncio.to_thread(ask, session))[0]


@pytest.mark.parametrize("wrong", [{"ciphers": "NONE-SUCH"}, {"ca_certs": Path(__file__)}])
def test_ciphers_and_signers_that_are_none_are_said(tmp_path: Path, wrong: dict[str, Any]) -> None:
    used = certified(tmp_path, "used", "127.0.0.1")
    with pytest.raises(StartupError, match=r"^ssl_ca_certs and ssl_ciphers: "):
        Certificate(Path(used.cert), Path(used.key), **wrong)


def locked(used: Trust) -> bytes:
    """Its key, with a passphrase."""
    how = Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    return load_pem_private_key(Path(used.key).read_bytes(), None).private_bytes(*how)


def run(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """In a process of a session of its own."""
    settings = {"stderr": subprocess.PIPE, "start_new_session": True, "timeout": 20, "text": True}
    return subprocess.run([sys.executable, "-c", code], **settings | options)


def test_a_key_with_a_passphrase_is_refused_and_no_terminal_asked_for_it(tmp_path: Path) -> None:
    """Neither at the start of a service, which has none, nor in a renewal: the terminal of a server that runs belongs to somebody else."""
    used = certified(tmp_path, "used", "127.0.0.1")
    code = (
        "import os, sys\nfrom pathlib import Path\n"
        "from engine_bridge.cluster.trust import Trust\n"
        "from gateway.doors.http.certificate import Certificate\n"
        "terminal = os.open(os.ttyname(0), os.O_RDWR)\n"  # belongs to this process now
        f"cert, key = Path({used.cert!r}), Path({used.key!r})\n"
        "certificate = Certificate(cert, key)\n"
        f"key.write_bytes({locked(used)!r})\n"
        "os.dup2(os.open(os.devnull, os.O_RDONLY), 0)\n"
        "for work in (certificate.look, lambda: Certificate(cert, key), Trust(token=b't', cert=str(cert), key=str(key)).client_tls):\n"
        "    try: work()\n"
        "    except Exception as error: print(error, file=sys.stderr)\n"
    )
    ours, its = pty.openpty()
    asked = run(code, stdin=its)
    os.close(its)
    os.close(ours)
    assert asked.stderr.count("has a passphrase") == 3, asked.stderr


def test_a_passphrase_is_read_from_a_pipe_where_there_is_no_terminal(tmp_path: Path) -> None:
    """As `vllm serve` does: `pass show key | overture serve …` in a container."""
    used = certified(tmp_path, "used", "127.0.0.1")
    Path(used.key).write_bytes(locked(used))
    code = (
        "from pathlib import Path\nfrom gateway.doors.http.certificate import Certificate\n"
        f"Certificate(Path({used.cert!r}), Path({used.key!r}))"
    )
    for said, fits in (("secret\n", True), ("another\n", False), ("", False)):
        done = run(code, input=said)
        assert (done.returncode == 0) is fits, done.stderr
        assert fits or "StartupError" in done.stderr


def fails(*_: object, **__: object) -> None:
    """Open a file when there are too many."""
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
