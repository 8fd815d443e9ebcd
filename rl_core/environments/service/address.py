"""URLs of services (--env_path, rl-core service): grpc://HOST:PORT/NAME?token_file=FILE&ca=FILE."""

from __future__ import annotations

import math
import re
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, urlsplit

from rl_core.environments.service.security import Access, read_token

SETTINGS = {"token_file", "ca", "reconnect_s", "owner"}
HOST_PORT = re.compile(r"([^:\[\]]+|\[[^\[\]]+\]):(\d+)")


def read_url(url: str, flag: str, form: str) -> tuple[SplitResult, dict[str, str]]:
    """(parts, settings) of a service's URL. Raises ValueError for other URLs; error texts do not
    contain values of settings."""
    parts = urlsplit(url)
    plain_url = url.partition("?")[0]
    settings = dict(parse_qsl(parts.query))
    if "@" in parts.netloc:
        raise ValueError(
            f"{flag} holds a password, which files and the shell's history would keep; use "
            "?token_file= instead"
        )
    port = HOST_PORT.fullmatch(parts.netloc)
    if parts.scheme not in ("grpc", "grpcs") or not port or not 0 < int(port[2]) < 1 << 16:
        raise ValueError(f"{plain_url} must be grpc://{form}, or grpcs:// with TLS")
    for key in settings.keys() - SETTINGS:
        raise ValueError(
            f"{plain_url}: unknown setting {key!r}; known: {', '.join(sorted(SETTINGS))}"
        )
    return parts, settings


def seconds(text: str, label: str) -> float:
    """Parses a setting in seconds. Raises ValueError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{label}={text} must be a number of seconds, such as 120")
    return value


def access_to(token_file: str, ca: str, is_tls: bool) -> Access:
    """A client's Access from files. Raises ValueError or OSError for missing files."""
    return Access(
        token=read_token(token_file), ca=Path(ca).read_bytes() if ca else None, tls=is_tls
    )
