"""TLS: certificates and encryption, if remote.tls_* name files."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of one side, read and checked. Each side checks the other's certificate."""

    certificate: bytes
    key: bytes = field(repr=False)
    authority: bytes
    certificate_path: str
    key_path: str

    def socket_context(self, *, server: bool) -> ssl.SSLContext:
        """Make the context of a plain socket.

        A client does not check the host name: samplers that relay weights are reached at addresses
        that no certificate contains. Any process with a certificate of the authority is accepted.

        Args:
            server: True if this process accepts the connection.
        """
        protocol = ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.certificate_path, self.key_path)
        context.load_verify_locations(cadata=self.authority.decode("ascii"))
        return context


def read_tls(remote: RemoteSection) -> TlsFiles | None:
    """Read the files that the configuration names; None if it names none.

    Raises ConfigError if only some are named, and for a file that is missing, unreadable or not
    PEM.
    """
    named = {
        "tls_certificate": remote.tls_certificate,
        "tls_key": remote.tls_key,
        "tls_authority": remote.tls_authority,
    }
    if all(path is None for path in named.values()):
        return None
    missing = [f"remote.{name}" for name, path in named.items() if path is None]
    if missing:
        raise ConfigError(
            f"TLS needs all of remote.tls_certificate, tls_key and tls_authority; set "
            f"{' and '.join(missing)}, or none of them"
        )
    content = {name: _read_pem(name, str(path)) for name, path in named.items()}
    files = TlsFiles(
        certificate=content["tls_certificate"],
        key=content["tls_key"],
        authority=content["tls_authority"],
        certificate_path=str(remote.tls_certificate),
        key_path=str(remote.tls_key),
    )
    try:
        files.socket_context(server=True)
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"remote.tls_certificate={files.certificate_path}, its key {files.key_path} and the "
            f"authority {remote.tls_authority} do not match: {error}"
        ) from error
    return files


def _read_pem(name: str, path: str) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"remote.{name}={path} cannot be read: {error.strerror}.") from error
    if b"-----BEGIN " not in content:
        raise ConfigError(f"remote.{name}={path} is not a PEM file (it has no BEGIN line).")
    return content
