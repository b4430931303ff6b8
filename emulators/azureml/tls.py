"""A certificate authority of a minute's life and a server certificate for this machine."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from isthmus.errors import NotInstalled


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Writes a certificate for 127.0.0.1 and localhost, with its key.

    Returns:
        The server's chain with its key (PEM), and the bundle that a client must trust: ours and the system's.

    Raises:
        NotInstalled: `cryptography` is missing.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ImportError:
        raise NotInstalled("the Azure ML emulator", extra="rehearse", module="cryptography") from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "isthmus emulator")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    chain, bundle = folder / "server.pem", folder / "ca-bundle.pem"
    chain.touch(mode=0o600)
    chain.write_bytes(private + public)
    system = ssl.get_default_verify_paths().cafile
    # What a client trusts is replaced as a whole: keep what it trusts today.
    others = Path(system).read_bytes() if system and Path(system).exists() else b""
    bundle.write_bytes(public + others)
    return chain, bundle


def server_context(chain: Path) -> ssl.SSLContext:
    """For a server that presents the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    return context
