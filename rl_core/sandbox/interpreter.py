"""A script that runs in a box. `serve SOCKET` is an interpreter that keeps its variables. `call
SOCKET` sends code from stdin to that interpreter and prints the output. Imports nothing of
rl_core."""

import ast
import linecache
import os
import socket
import sys
import tempfile
import time
import traceback

START_S = 10.0
MAX_HALF = 8000  # Bytes that are kept of the beginning and of the end of longer output.
NO_INTERPRETER = 3  # Exit status if the interpreter has ended or ends during the call.


def serve(path):
    names = {"__name__": "__main__"}
    sys.path.insert(0, "")
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    for number in range(1, sys.maxsize):
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as file:
            code = file.read().decode()
            # The first byte distinguishes an empty output from an ended interpreter.
            connection.sendall(b"+" + run(code, names, f"<call {number}>"))


def run(code, names, title):
    """Runs code and returns its stdout and stderr, and the repr of a last expression's value."""
    with tempfile.TemporaryFile() as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        linecache.cache[title] = (len(code), None, code.splitlines(True), title)
        try:
            execute(code, names, title)
        except BaseException as error:
            # The first frames belong to this file, or to the parser for a syntax error.
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename != title:
                trace = trace.tb_next
            traceback.print_exception(type(error), error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size <= 2 * MAX_HALF:
            return file.read()
        first = file.read(MAX_HALF)
        file.seek(size - MAX_HALF)
        left_out = f"\n[{size - 2 * MAX_HALF} bytes left out]\n"
        return first + left_out.encode() + file.read()


def execute(code, names, title):
    tree = ast.parse(code, title)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    exec(compile(tree, title, "exec"), names)
    if last is not None:
        value = eval(compile(last, title, "eval"), names)
        if value is not None:
            print(repr(value))


def call(path):
    """Sends code to the interpreter, prints the output and returns the exit status."""
    output = b""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connect(connection, path)
            connection.sendall(sys.stdin.buffer.read())
            connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(1 << 16):
                output += chunk
        except OSError:
            pass
    sys.stdout.buffer.write(output[1:])
    return 0 if output else NO_INTERPRETER


def connect(connection, path):
    """Waits for an interpreter that has just been started."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            return connection.connect(path)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


if __name__ == "__main__":
    verb, path = sys.argv[1:]
    sys.exit(serve(path) if verb == "serve" else call(path))
