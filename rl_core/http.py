"""HTTP as a client of servers on this and other machines needs it: one request, without a library."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit


async def request(
    url: str, body: bytes = b"", headers: dict[str, str] | None = None, method: str = "POST"
) -> tuple[int, bytes]:
    """(status, content) of one request, whose body is JSON. As HTTP/1.0, whose answers end where the connection does. Raises
    OSError or EOFError where there is no answer. Who cancels it closes the connection."""
    at = urlsplit(url)
    port, tls = at.port or (443 if at.scheme == "https" else 80), True if at.scheme == "https" else None
    reader, writer = await asyncio.open_connection(at.hostname, port, ssl=tls)
    fields = {"Host": at.netloc, "Content-Type": "application/json", "Content-Length": len(body), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    try:
        writer.write(f"{method} {at.path} HTTP/1.0\r\n{head}\r\n".encode() + body)
        await writer.drain()
        head, separator, content = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    if not separator:
        raise EOFError("the connection was closed before an answer")
    return int(head.split()[1]), content
