"""Images, asked of a registry over HTTP: there, missing, behind a login, out of reach."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from crosstrain.components import images
from crosstrain.components.core.launch.job import RunOn
from crosstrain.components.preflight.registries import check_image, check_images

DIGEST = "sha256:" + "ab" * 32
GRANTS = {"token": "token", "access": "access_token"}
"""Owner of an image to the name that its token server gives the token; the token is the owner's name."""


class Registry(BaseHTTPRequestHandler):
    """Has `open/gpu`; `token/gpu` and `access/gpu` for an anonymous token; `private/gpu` for nobody here."""

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        host = f"http://127.0.0.1:{self.server.server_address[1]}"
        _, _, owner, _, _, reference = self.path.split("/")
        if owner == "open" or (owner in GRANTS and self.headers.get("Authorization") == f"Bearer {owner}"):
            self.send_response(200 if reference in (DIGEST, "1") else 404)
        else:
            self.send_response(401)
            token = f'Bearer realm="{host}/{owner}",service="here",scope="pull"'
            self.send_header("WWW-Authenticate", token if owner in GRANTS else 'Basic realm="x"')
        self.end_headers()

    def do_GET(self) -> None:
        owner, _, query = self.path[1:].partition("?")
        body = json.dumps({GRANTS[owner]: owner} if query == "service=here&scope=pull" else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("image", "wanted"),
    [
        (f"{{}}/open/gpu@{DIGEST}", ""),
        (f"{{}}/open/gpu:1@{DIGEST}", ""),
        (f"{{}}/open/gpu:gone@{DIGEST}", ""),
        (f"{{}}/token/gpu@{DIGEST}", ""),
        (f"{{}}/access/gpu@{DIGEST}", ""),
        ("{}/open/gpu:1", "warning: image: by tag, not by digest"),
        ("{}/open/gpu@sha256:" + "cd" * 32, "error: image: its registry does not have it"),
        ("{}/token/gpu@sha256:" + "cd" * 32, "error: image: its registry does not have it"),
        (f"{{}}/private/gpu@{DIGEST}", "not checked: image: its registry answers with status 401 without a login"),
        ("crosstrain/gpu-python:0.1.0", "error: image: names no registry; publish the images"),
        (f"127.0.0.1:9/open/gpu@{DIGEST}", "not checked: image: its registry is not reached from here"),
    ],
)
def test_an_image_is_there_or_why_not(image, wanted, registry):
    (line,) = [finding.line for finding in check_image(image.format(registry), "image")] or [""]
    assert line.startswith(wanted) and bool(line) == bool(wanted)


def test_a_job_on_trainium_is_asked_for_the_image_made_for_it():
    asked = [
        SimpleNamespace(on_cluster=cluster, component=name, run_on=RunOn(target="trainjob", instance_type=kind))
        for name, kind, cluster in (
            ("train_fp8", "ml.p5.48xlarge", True),
            ("finetune_lora", "ml.trn1.32xlarge", True),
            ("other", "ml.p5.48xlarge", True),
            ("local", "ml.trn1.32xlarge", False),
        )
    ]
    wheres = [finding.where for finding in check_images(asked)]
    assert wheres == [f"train_fp8 image {images.GPU}", f"finetune_lora image {images.NEURON}"]
