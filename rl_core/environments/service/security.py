"""Access to a service: a bearer token, and TLS with PEM files. The token comes from a file or the
environment, never from a flag or a URL."""

from __future__ import annotations

import argparse
import hmac
import os
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from rl_core.environments.service.flags import TOKEN_VARIABLE


@dataclass(kw_only=True)
class Access:
    token: str = field(default="", repr=False)
    ca: bytes | None = None  # CA certificates that a client trusts.
    key: bytes | None = field(default=None, repr=False)  # The server's private key.
    cert: bytes | None = None
    tls: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace) -> Access:
        """Access from flags. Removes the token from os.environ, so that programs started by
        environments do not inherit it. Raises ValueError or OSError for missing files."""
        if bool(args.tls_cert) != bool(args.tls_key):
            raise ValueError(
                "--tls_cert and --tls_key need each other: set both, or neither for plain text"
            )
        token = read_token(args.token_file)
        os.environ.pop(TOKEN_VARIABLE, None)
        return cls(
            token=token,
            ca=Path(args.tls_ca).read_bytes() if args.tls_ca not in ("", "system") else None,
            key=Path(args.tls_key).read_bytes() if args.tls_key else None,
            cert=Path(args.tls_cert).read_bytes() if args.tls_cert else None,
            tls=bool(args.tls_ca or args.tls_cert),
        )

    def metadata(self) -> list[tuple[str, str]]:
        return [("authorization", f"Bearer {self.token}")] if self.token else []

    def admits(self, metadata) -> bool:
        """True if a call's metadata has the token. Compares in constant time."""
        return self.is_right(dict(metadata or ()).get("authorization", ""))

    def is_right(self, authorization: str | bytes) -> bool:
        received = (
            authorization.encode(errors="replace")
            if isinstance(authorization, str)
            else authorization
        )
        return not self.token or hmac.compare_digest(received, f"Bearer {self.token}".encode())

    def channel_aio(self, address: str, options: list) -> grpc.aio.Channel:
        if self.tls:
            return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(self.ca), options)
        return grpc.aio.insecure_channel(address, options)

    def channel(self, address: str, options: list) -> grpc.Channel:
        if self.tls:
            return grpc.secure_channel(address, grpc.ssl_channel_credentials(self.ca), options)
        return grpc.insecure_channel(address, options)


class Admission(grpc.aio.ServerInterceptor):
    """Refuses calls without the token before their messages are read into memory. Applies to the
    listed services."""

    def __init__(self, access: Access, services: tuple[str, ...]):
        self.access = access
        self.methods = tuple(f"/{service}/" for service in services)

    async def intercept_service(self, continuation, details):
        if not details.method.startswith(self.methods) or self.access.admits(
            details.invocation_metadata
        ):
            return await continuation(details)
        return grpc.stream_stream_rpc_method_handler(refuse)


async def refuse(_, context: grpc.aio.ServicerContext) -> None:
    message = "the bearer token is missing or wrong; send authorization: Bearer TOKEN "
    message += f"(rl_core clients read it from {TOKEN_VARIABLE} or a token_file)"
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)


def read_token(path: str) -> str:
    """The token from a file, or from the environment variable. Raises ValueError for a token that
    an HTTP header cannot hold."""
    try:
        token = (
            Path(path).read_text(encoding="utf-8").strip()
            if path
            else os.environ.get(TOKEN_VARIABLE, "").strip()
        )
    except OSError as error:
        raise ValueError(f"token_file {path}: {error.strerror}") from None
    if path and not token:
        raise ValueError(f"token_file {path} is empty")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ValueError(
            f"the token in {path or TOKEN_VARIABLE} must be printable ASCII without spaces"
        )
    return token
