"""How gateways and nodes of a cluster authenticate: by a token that is never sent, and beyond this machine by TLS."""

from __future__ import annotations

import ipaddress
import os
import secrets
import ssl
import stat
from pathlib import Path
from typing import NoReturn

from msgspec import Struct

from engine_bridge.protocol.errors import ClusterError

TOKEN_BYTES = 32
# Below this a token that a person made up can be guessed from one recorded greeting. Chosen.
MIN_TOKEN_CHARS = 32
HOW_TO_MAKE = (
    "; for machines 10.0.0.1 and 10.0.0.2: openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 "
    "-subj /CN=overture -addext subjectAltName=IP:10.0.0.1,IP:10.0.0.2 -keyout cluster.key -out cluster.crt"
)
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Trust(Struct, frozen=True, kw_only=True):
    """The secrets of a cluster. cert, key: PEM files, the same on all machines; both or neither. Without them connections are in the clear."""

    token: bytes
    cert: str = ""
    key: str = ""

    def server_tls(self) -> ssl.SSLContext | None:
        """Return the context of the listening side, None without a certificate. Raises ClusterError."""
        return self._mutual(ssl.PROTOCOL_TLS_SERVER)

    def client_tls(self) -> ssl.SSLContext | None:
        """Return the context of the connecting side, None without a certificate. Raises ClusterError."""
        return self._mutual(ssl.PROTOCOL_TLS_CLIENT)

    def _mutual(self, side: int) -> ssl.SSLContext | None:
        """Make a context in which each end shows the cluster's certificate and takes no other. A node may have any address: names are not checked."""
        if not self.cert:
            return None
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        # The certificate itself is the anchor, whatever its signature.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            context.load_cert_chain(self.cert, self.key, password=self._refuse_to_ask)
            context.load_verify_locations(self.cert)
        except (OSError, ssl.SSLError) as error:
            reason = getattr(error, "reason", None) or error.strerror or error
            raise ClusterError(
                f"cluster_cert, cluster_key: cannot use {self.cert} with {self.key}: {reason}. Both are PEM files{HOW_TO_MAKE}"
            ) from error
        return context

    def _refuse_to_ask(self) -> NoReturn:
        """Keep OpenSSL from asking at the terminal for a passphrase: contexts are made while the cluster runs, too."""
        raise ClusterError(
            f"cluster_key: {self.key} has a passphrase. Take it off: openssl pkey -in {self.key} -out FILE"
        )

    def check_name(self, host: str) -> None:
        """Check that the certificate names this machine's address, as Ray demands. Raises ClusterError."""
        if not self.cert:
            return
        from cryptography import x509  # takes a while to load

        try:
            found = x509.load_pem_x509_certificate(Path(self.cert).read_bytes())
            names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            addresses = names.get_values_for_type(x509.IPAddress)
        except (OSError, ValueError, x509.ExtensionNotFound):
            addresses = []
        if ipaddress.ip_address(host) not in addresses:
            raise ClusterError(
                f"cluster_cert: {self.cert} does not name {host}: it must name the address of each machine of the cluster{HOW_TO_MAKE}"
            )


def read_token(path: Path) -> bytes:
    """Return the token in a file, which is made if missing. Raises ClusterError for a file that others can read, or a token that can be guessed."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return _read(path)
    except OSError as error:
        raise ClusterError(f"cluster_token_file: cannot make {path}: {error.strerror}") from error
    with open(fd, "w", encoding="ascii") as file:
        token = secrets.token_hex(TOKEN_BYTES)
        file.write(token + "\n")
    return token.encode()


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            is_open = os.fstat(file.fileno()).st_mode & _OTHERS
            token = file.read(4096).strip()
    except OSError as error:
        raise ClusterError(f"cluster_token_file: cannot read {path}: {error.strerror}") from error
    if is_open:
        raise ClusterError(f"cluster_token_file: others can read {path}. Run: chmod 600 {path}")
    if len(token) < MIN_TOKEN_CHARS:
        raise ClusterError(
            f"cluster_token_file: {path} holds fewer than {MIN_TOKEN_CHARS} characters. "
            "Delete it, and it is made anew; every machine of the cluster needs a copy of it."
        )
    return token
