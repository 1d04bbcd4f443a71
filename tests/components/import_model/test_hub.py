"""A model of the hub: a pinned commit is copied whole, all else ends in one line, and the token shows nowhere.

The hub is a local server that answers the requests of huggingface_hub, which runs in a process of its own because it
reads HF_ENDPOINT once.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.hub import read_address

COMMIT, TOKEN = "0123456789abcdef" * 2 + "01234567", "hf_verySecretToken"
ADDRESS = f"hf://tiny/llama@{COMMIT}"


class _Hub(ThreadingHTTPServer):
    """One repository, tiny/llama, at one commit."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.folder = folder
        self.private = False
        self.asked: list[str] = []


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        tree, files = f"/api/models/tiny/llama/tree/{COMMIT}", f"/tiny/llama/resolve/{COMMIT}/"
        found = self.server.folder / path.removeprefix(files)
        if self.server.private and self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._send(401, b"{}")
        elif path == tree:
            entries = [
                {"type": "file", "path": p.relative_to(self.server.folder).as_posix(), "size": p.stat().st_size,
                 "oid": hashlib.sha1(p.read_bytes()).hexdigest()}
                for p in sorted(self.server.folder.rglob("*")) if p.is_file()
            ]  # fmt: skip
            self._send(200, json.dumps(entries).encode())
        elif path.startswith(files) and found.is_file():
            self._send(200, found.read_bytes())
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        known = {"Content-Length": str(len(body)), "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}
        for name, value in {**known, "X-Repo-Commit": COMMIT, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(save_model, tmp_path: Path) -> Iterator[_Hub]:
    folder = save_model(tmp_path / "hub", shard="60KB")
    (folder / "README.md").write_text("not part of the model")
    (folder / "original").mkdir()
    (folder / "original/model.safetensors").write_bytes(b"another form of the weights")
    with _Hub(folder) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _run(component: str, endpoint: str, *options: str, token: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1"}
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        environment.pop(name, None)
    if token:
        environment["HF_TOKEN"] = token
    command = [sys.executable, "-m", f"crosstrain.components.{component}", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def _endpoint(hub: _Hub) -> str:
    return f"http://127.0.0.1:{hub.server_address[1]}"


def test_a_pinned_commit_is_copied_and_the_token_shows_nowhere(hub, import_model, tmp_path) -> None:
    hub.private = True
    output = tmp_path / "model"
    done = _run("import_model", _endpoint(hub), "--source", ADDRESS, "--output", str(output), token=TOKEN)
    assert done.returncode == 0, done.stderr
    artifact, local = Artifact.open(str(output), "model"), import_model(hub.folder)
    assert (artifact.manifest.files, artifact.facts) == (local.manifest.files, local.facts)
    assert (artifact.manifest.base, artifact.manifest.options["source"]) == ("", ADDRESS)
    assert artifact.fetch_all() == output
    files = {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()}
    assert files == {file.path for file in artifact.manifest.files} | {"manifest.json", "run.json"}
    written = (output / "manifest.json").read_text() + (output / "run.json").read_text()
    assert TOKEN not in done.stdout + done.stderr + written


@pytest.mark.parametrize(
    ("address", "private", "token", "says"),
    [
        (ADDRESS, True, "", "the hub answers 401"),
        (ADDRESS, True, "hf_anotherToken", "the hub answers 401"),
        (f"hf://tiny/other@{COMMIT}", False, "", "the hub answers 404"),
        (f"hf://tiny/llama@{COMMIT[::-1]}", False, "", "the hub answers 404"),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub, tmp_path, address, private, token, says) -> None:
    hub.private = private
    done = _run("import_model", _endpoint(hub), "--source", address, "--output", str(tmp_path / "m"), token=token)
    lines = done.stderr.strip().splitlines()
    assert done.returncode != 0 and len(lines) == 1, done.stderr
    assert address in lines[0] and says in lines[0] and "HF_TOKEN" in lines[0]
    assert not (tmp_path / "m").exists() and (not token or token not in done.stderr)


@pytest.mark.slow  # huggingface_hub tries for 24 s
def test_no_network_is_one_line(tmp_path) -> None:
    done = _run("import_model", "http://127.0.0.1:9", "--source", ADDRESS, "--output", str(tmp_path / "m"))
    lines = done.stderr.strip().splitlines()
    assert done.returncode != 0 and len(lines) == 1, done.stderr
    assert "the hub was not reached" in lines[0] and "give the folder" in lines[0]


def test_an_unsupported_model_is_refused_before_its_weights_are_fetched(hub, tmp_path) -> None:
    settings = json.loads((hub.folder / "config.json").read_text()) | {"architectures": ["MixtralForCausalLM"]}
    (hub.folder / "config.json").write_text(json.dumps(settings))
    done = _run("import_model", _endpoint(hub), "--source", ADDRESS, "--output", str(tmp_path / "m"))
    assert done.returncode != 0 and f"{ADDRESS}/config.json: names MixtralForCausalLM" in done.stderr
    assert not any("safetensors" in asked for asked in hub.asked)


@pytest.mark.parametrize("address", ["hf://tiny/llama", "hf://tiny/llama@main", f"hf://tiny/llama@{COMMIT[:12]}"])
def test_a_branch_or_half_a_commit_is_refused(address) -> None:
    with pytest.raises(ValueError, match="name the commit by its 40 hexadecimal digits"):
        read_address(address)


def test_an_address_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="write hf://organization/name@commit"):
        read_address(f"hf://datasets/tiny/llama@{COMMIT}")


def test_preflight_looks_the_model_up(hub, tmp_path) -> None:
    options = ("--output", str(tmp_path / "run"), "--tune-steps", "2", "--sequence-length", "512", "--model")
    found = _run("preflight", _endpoint(hub), *options, ADDRESS)
    assert "above the model's 256 positions" in found.stderr + found.stdout
    absent = _run("preflight", _endpoint(hub), *options, "hf://tiny/llama@main")
    assert "name the commit by its 40 hexadecimal digits" in absent.stderr + absent.stdout
