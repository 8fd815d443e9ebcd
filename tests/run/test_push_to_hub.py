"""--push_to_hub, by huggingface_hub's own client, against a server that speaks the part of the
hub's API that it asks for."""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants
from kit import run, words

from rl_core import Config, train
from rl_core.train import main


class Hub(BaseHTTPRequestHandler):
    """POST /api/repos/create, .../preupload/main, .../commit/main; committed files stay in
    `server.files`."""

    def do_POST(self):
        body = (
            self.rfile.read(int(self.headers["Content-Length"]))
            if "Content-Length" in self.headers
            else self.chunks()
        )
        url, repository = f"http://{self.headers['Host']}", "/".join(self.path.split("/")[3:5])
        if self.server.refuses in self.path:
            return self.reply({"error": "no such token"}, 401)
        if self.path.endswith("/create"):
            return self.reply(
                {"url": f"{url}/{'/'.join(json.loads(body)[k] for k in ('organization', 'name'))}"}
            )
        if "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            return self.reply({"files": files})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.server.files[f"{repository}/{line['value']['path']}"] = content
        return self.reply(
            {"commitUrl": f"{url}/{repository}/commit/1", "commitOid": "1", "pullRequestUrl": None}
        )

    def chunks(self) -> bytes:
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def reply(self, value: dict, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch):
    """The server; huggingface_hub asks it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.refuses = {}, "nothing"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    yield server
    server.shutdown()


@pytest.fixture
def flags(places, tmp_path):
    more = "--max_tokens 6 --tasks_per_step 2 --group_size 2 --num_steps 1 --push_to_hub lab/digits"
    return words("--model", places["model"], "--env_path", f"{places['dir']}/letters.py", more)


def test_the_export_is_pushed_file_by_file(hub, flags, tmp_path, capsys):
    out = run(tmp_path / "run", flags, "--actors.policy.lora.rank 2")
    names = {"": "policy", "adapter/": "policy_adapter"}
    want = {
        f"lab/digits/{position}{file.name}": file.read_bytes()
        for position, name in names.items()
        for file in (out / "hf" / name).iterdir()
    }
    assert hub.files == want and f"pushed {out}/hf/policy to lab/digits" in capsys.readouterr().out


def test_a_push_that_fails_says_what_to_do_and_loses_nothing(hub, flags, tmp_path, capsys):
    hub.refuses, out = "/commit/", tmp_path / "run"
    assert main([*flags, "--out", str(out)]) == 1
    assert (
        f"the model is in {out}/hf/policy: hf upload lab/digits {out}/hf/policy"
        in capsys.readouterr().err
    )
    assert (out / "hf/policy/model.safetensors").is_file() and (
        out / "checkpoints/step_000001/manifest.json"
    ).is_file()
    hub.refuses = "nothing"
    run(out, flags, "--resume")
    assert "lab/digits/model.safetensors" in hub.files


def test_an_interrupted_run_pushes_nothing(hub, places, tmp_path):
    def interrupt(step, result):
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    more = {
        "max_tokens": 6,
        "tasks_per_step": 2,
        "group_size": 2,
        "num_steps": 99,
        "push_to_hub": "lab/digits",
    }
    config = Config(
        model=str(places["model"]),
        env_path=f"{places['dir']}/letters.py",
        out=str(tmp_path / "run"),
        **more,
    )
    try:
        with pytest.raises(KeyboardInterrupt):
            train(config, on_step=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert hub.files == {} and list((tmp_path / "run/checkpoints").glob("step_*"))


def test_a_hub_that_refuses_is_told_before_a_model_loads(hub, flags, tmp_path, capsys):
    hub.refuses = "/create"
    assert main([*flags, "--out", str(tmp_path / "run")]) == 1
    assert "error: --push_to_hub lab/digits: " in capsys.readouterr().err
    assert not (tmp_path / "run/metrics.jsonl").exists()
