"""Certificates that a cluster signed itself, for tests."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from engine_bridge.cluster.trust import Trust


def certified(folder: Path, name: str, *addresses: str) -> Trust:
    """A cluster of its own, with a certificate that it signed itself. addresses: of its machines."""
    key, subject = Ed25519PrivateKey.generate(), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    begin = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    end, public = begin + datetime.timedelta(36500), key.public_key()
    made = x509.CertificateBuilder(subject, subject, public, 1, begin, end)
    if addresses:
        named = [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
        made = made.add_extension(x509.SubjectAlternativeName(named), critical=False)
    cert_path, key_path = folder / f"{name}.crt", folder / f"{name}.key"
    cert_path.write_bytes(made.sign(key, None).public_bytes(Encoding.PEM))
    key_path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return Trust(token=b"t", cert=str(cert_path), key=str(key_path))
