"""Makes the certificates and tokens of listeners that other machines reach."""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import yaml

from rlightning.cluster.guard import require
from rlightning.errors import ConfigError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

SCOPES = ("env", "actor", "learner", "admin")
"""What tokens are made for."""

_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9][A-Za-z0-9-]{0,62}(\.[A-Za-z0-9][A-Za-z0-9-]{0,62})*")
_CLIENT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_CA_DAYS = 3650
# Clocks differ, and a certificate that is not valid yet is refused like one that has expired.
_EARLY = timedelta(hours=1)

_SECRET = 0o600
# A container's user is another one than the owner of the folder, which itself is closed to others.
_SHARED = 0o644


def make_keys(
    folder: Path, hosts: Sequence[str], *, clients: Sequence[str] = (), days: int = 365
) -> list[Path]:
    """Makes what a listener with TLS and tokens needs, and what its clients show.

    - `ca.pem`, `ca.key`: the authority;
    - `server.pem`, `server.key`: certificate of the services, for `hosts` and for localhost;
    - `tokens.yaml`: hashes of the tokens, and what they may call;
    - `SCOPE.token`: a token for each of `SCOPES`;
    - `CLIENT.pem`, `CLIENT.key`: certificates of clients, for listeners with `client_ca_file`.

    The authority and the tokens that a folder of this function holds are kept; certificates are
    made anew.

    Args:
        folder: Where to; made if absent, open to its owner only.
        hosts: Names or addresses by which clients dial the services.
        clients: Names of the clients that get certificates.
        days: How long certificates are valid, in days; the authority is for ten years.

    Returns:
        The files that were written.

    Raises:
        ConfigError: A host or client is no name, the folder holds other files or cannot be written,
            or the extra `serve` is not installed.
    """
    require("rlightning keys", "serve", "cryptography")
    for host in hosts:
        if not (_is_address(host) or _HOST.fullmatch(host)):
            raise ConfigError(f"--host: expected a name or an IP address, no port, got {host!r}")
    for client in clients:
        if not _CLIENT.fullmatch(client) or client in {"ca", "server"}:
            raise ConfigError(
                f"--client: expected [A-Za-z0-9._-]{{1,64}}, but not ca or server, got {client!r}"
            )
    if not 1 <= days <= _CA_DAYS:
        raise ConfigError(f"--days: expected 1 to {_CA_DAYS}, got {days}")
    valid = timedelta(days=days)
    try:
        files = _Files(folder)
        ca = files.authority()
        names = [*dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1"])]
        files.write_identity("server", _identity(hosts[0], ca, valid, names), _SHARED)
        for client in clients:
            files.write_identity(client, _identity(client, ca, valid))
        files.write_tokens()
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}") from error
    return files.written


class _Identity(NamedTuple):
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: EllipticCurvePrivateKey


class _Files:
    """The folder.

    Attributes:
        written: What was written.

    Raises:
        ConfigError: The folder is there and holds no authority.
        OSError: It cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.written: list[Path] = []
        self._folder = folder
        if folder.exists() and not (folder / "ca.key").exists():
            raise ConfigError(
                f"--out: expected a new folder, or one that this command has made, got {folder}"
            )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def authority(self) -> _Identity:
        """Returns the authority, made unless it is there.

        Raises:
            ConfigError: What is there is none.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        certificate, key = self._folder / "ca.pem", self._folder / "ca.key"
        if not key.exists():
            ca = _identity("RLightning development CA", None, timedelta(days=_CA_DAYS))
            self.write_identity("ca", ca)
            return ca
        try:
            loaded = load_pem_private_key(key.read_bytes(), None)
            found = x509.load_pem_x509_certificate(certificate.read_bytes())
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{certificate}, {key}: not an authority: {error}") from error
        if not isinstance(loaded, EllipticCurvePrivateKey):
            raise ConfigError(f"{key}: expected a key that this command has made")
        return _Identity(found, loaded)

    def write_identity(self, name: str, identity: _Identity, key_mode: int = _SECRET) -> None:
        """Writes a certificate and its key."""
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            NoEncryption,
            PrivateFormat,
        )

        key = identity.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        self._write(f"{name}.key", key, key_mode)
        self._write(f"{name}.pem", identity.certificate.public_bytes(Encoding.PEM), _SHARED)

    def write_tokens(self) -> None:
        """Writes the tokens that are not there yet, and the file that names all of them."""
        entries = []
        for scope in SCOPES:
            path = self._folder / f"{scope}.token"
            if not path.exists():
                self._write(path.name, f"{secrets.token_urlsafe(32)}\n".encode(), _SECRET)
            digest = hashlib.sha256(path.read_text(encoding="utf-8").strip().encode()).hexdigest()
            entries.append({"name": scope, "sha256": digest, "scopes": [scope]})
        self._write("tokens.yaml", yaml.safe_dump(entries, sort_keys=False).encode(), _SHARED)

    def _write(self, name: str, data: bytes, mode: int) -> None:
        path = self._folder / name
        path.unlink(missing_ok=True)  # its mode may be another one
        path.touch(mode, exist_ok=False)
        path.chmod(mode)  # whatever the umask
        path.write_bytes(data)
        self.written.append(path)


def _identity(
    name: str, issuer: _Identity | None, valid: timedelta, hosts: Sequence[str] = ()
) -> _Identity:
    """Makes a certificate; without an issuer, that of an authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    signer = key if issuer is None else issuer.key
    now = datetime.now(timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(now + valid)
        .add_extension(x509.BasicConstraints(issuer is None, None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    if issuer is None:
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        builder = builder.add_extension(usage, critical=True)
    else:
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    if hosts:
        names = [
            x509.IPAddress(ipaddress.ip_address(host)) if _is_address(host) else x509.DNSName(host)
            for host in hosts
        ]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return _Identity(builder.sign(signer, hashes.SHA256()), key)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
