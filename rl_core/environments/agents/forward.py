"""Runs a command inside a box, where http://127.0.0.1:PORT leads to a Unix socket.

    python3 forward.py SOCKET COMMAND...

A box may have an older Python than the run and no packages: this file needs Python 3.8 alone.
"""

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress

# Stands for the endpoint's address in the values of environment variables.
ADDRESS = "http://endpoint.invalid"


def pump(source: socket.socket, target: socket.socket) -> None:
    """Copies until the source ends."""
    try:
        while True:
            data = source.recv(1 << 16)
            if not data:
                break
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # one side is gone
        close(source)
        close(target)


def close(end: socket.socket) -> None:
    with suppress(OSError):  # It is closed already.
        end.shutdown(socket.SHUT_RDWR)


def forward(client: socket.socket, path: str) -> None:
    with client, socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(path)
        except OSError:  # The episode has ended.
            return
        back = threading.Thread(target=pump, args=(server, client), daemon=True)
        back.start()
        pump(client, server)
        back.join()


def accept(listener: socket.socket, path: str) -> None:
    while True:
        client, _ = listener.accept()
        try:
            threading.Thread(target=forward, args=(client, path), daemon=True).start()
        except RuntimeError:  # The box has no room for another thread. Its client may try again.
            client.close()


def main(path: str, command: "list[str]") -> int:
    """The command's exit code; 128 and the number of the signal that ended it, as in a shell."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    threading.Thread(target=accept, args=(listener, path), daemon=True).start()
    environ = {name: value.replace(ADDRESS, address) for name, value in os.environ.items()}
    try:
        code = subprocess.call(command, env=environ)
    except OSError as error:
        print(f"{command[0]}: {error}", file=sys.stderr)
        return 127
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2:])
    sys.stderr.flush()
    os._exit(code)  # Does not wait for open connections.
