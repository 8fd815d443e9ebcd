"""Inside a box without network: shows a Unix socket at 127.0.0.1, and runs a command there.

python forward.py SOCKET PORT COMMAND ...
"""

import asyncio
import sys
from contextlib import suppress


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def main(path: str, port: int, command: list[str]) -> int:
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(path)
        await asyncio.gather(pump(reader, back), pump(there, writer))

    await asyncio.start_server(connect, "127.0.0.1", port)
    process = await asyncio.create_subprocess_exec(*command)
    return await process.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
