"""A Kubernetes API server over real HTTP that tests may break."""

import json
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


CORE = {"pods": "Pod", "events": "Event"}
KUEUE = "kueue.x-k8s.io/v1beta1"
GROUPS = {
    "sagemaker.amazonaws.com/v1": {"hyperpodpytorchjobs": "HyperPodPytorchJob"},
    "trainer.kubeflow.org/v1alpha1": {"trainjobs": "TrainJob"},
    "kubeflow.org/v1": {"pytorchjobs": "PyTorchJob"},
    KUEUE: {"workloads": "Workload", "localqueues": "LocalQueue"},
    "v1": CORE,
}
LINE = tuple[str, str]


class ApiServer:
    """A Kubernetes API over real HTTP: discovery, objects, watches with history, logs; and ways to break it.

    It does what an API server does and nothing a controller does: the tests play the operator with `put`.
    """

    def __init__(self) -> None:
        self.groups = {version: dict(plurals) for version, plurals in GROUPS.items()}
        self.objects: dict[str, dict[str, Any]] = {}
        """plural to name to object"""
        self.history: list[tuple[int, str, str, Any]] = []
        """resource version, plural, event type, object"""
        self.version = 100
        self.age = 0.0
        """how long ago new objects were made, in seconds"""
        self.forgotten = 0
        """watches from an older version are told 410"""
        self.epoch = 0
        """raised to drop every open stream"""
        self.refusals: dict[tuple[str, str], tuple[int, str]] = {}
        """verb and plural to HTTP status and message"""
        self.denied: set[tuple[str, str]] = set()
        """verb and plural that a review of rights denies"""
        self.requests: list[tuple[str, str]] = []
        self.logs: dict[str, list[LINE]] = {}
        self.log_ended: set[str] = set()
        self.previous_logs: dict[str, list[LINE]] = {}
        self.changed = threading.Condition()
        handler = type("Handler", (_Handler,), {"api": self})
        self.server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.drop()
        self.server.shutdown()
        self.server.server_close()

    def put(self, plural: str, name: str, /, **parts: Any) -> dict[str, Any]:
        """Create or change an object, as a controller would."""
        with self.changed:
            known = self.objects.setdefault(plural, {})
            old = known.get(name)
            meta = (old or {}).get("metadata") or {"uid": str(uuid.uuid4()), "creationTimestamp": ago(self.age)}
            self.version += 1
            given = parts.pop("metadata", {})
            metadata = {**meta, "name": name, "namespace": "team", **given, "resourceVersion": str(self.version)}
            known[name] = {**(old or {}), **parts, "metadata": metadata}
            self._record(plural, "MODIFIED" if old else "ADDED", known[name])
            return known[name]

    def remove(self, plural: str, name: str) -> None:
        with self.changed:
            self.version += 1
            gone = self.objects.get(plural, {}).pop(name)
            gone["metadata"]["resourceVersion"] = str(self.version)
            self._record(plural, "DELETED", gone)

    def _record(self, plural: str, kind: str, found: dict[str, Any]) -> None:
        self.history.append((self.version, plural, kind, json.loads(json.dumps(found))))
        self.changed.notify_all()

    def forget(self) -> None:
        """Drop every stream and the history, so that watches must list anew."""
        with self.changed:
            self.version += 1
            self.forgotten = self.version
            self.history.clear()
        self.drop()

    def drop(self) -> None:
        """Cut every open stream in the middle of a line."""
        with self.changed:
            self.epoch += 1
            self.changed.notify_all()

    def say(self, pod: str, *lines: str) -> None:
        """Lines in a pod's log, all of one nanosecond."""
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f") + "001Z"
        with self.changed:
            self.logs.setdefault(pod, []).extend((stamp, line) for line in lines)
            self.changed.notify_all()

    def end_log(self, pod: str) -> None:
        with self.changed:
            self.log_ended.add(pod)
            self.changed.notify_all()

    def wait_for(self, met: Callable[[], Any], seconds: float = 20) -> Any:
        """Wait until something is so, and return it."""
        deadline = time.monotonic() + seconds
        with self.changed:
            while not (found := met()):
                assert time.monotonic() < deadline, "it did not come to pass"
                self.changed.wait(0.02)
            return found


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may hang up on a stream."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: ApiServer

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_PATCH(self) -> None:
        self._serve("PATCH")

    def do_DELETE(self) -> None:
        self._serve("DELETE")

    def _serve(self, method: str) -> None:
        address = urlsplit(self.path)
        query = dict(parse_qsl(address.query))
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
        parts = address.path.strip("/").split("/")
        if parts[-1] == "selfsubjectaccessreviews":
            return self._review(body["spec"]["resourceAttributes"])
        if "namespaces" not in parts:
            return self._discover(parts)
        plural, *rest = parts[parts.index("namespaces") + 2 :]
        verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}.get(method) or (
            "watch" if "watch" in query else "get" if rest else "list"
        )
        if rest[1:] == ["log"]:
            plural = "pods/log"
        with self.api.changed:
            self.api.requests.append((verb, plural))
            self.api.changed.notify_all()
        if refusal := self.api.refusals.get((verb, plural)):
            return self._status(*refusal)
        if plural == "pods/log":
            return self._log(rest[0], query)
        getattr(self, f"_{verb}")(plural, rest[0] if rest else "", body, query)

    def _review(self, asked: dict[str, str]) -> None:
        resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
        if refusal := self.api.refusals.get(("create", "selfsubjectaccessreviews")):
            return self._status(*refusal)
        self._send({"status": {"allowed": (asked["verb"], resource) not in self.api.denied}}, 201)

    def _discover(self, parts: list[str]) -> None:
        served = self.api.groups
        if parts == ["version"]:
            return self._send({"gitVersion": "v1.34.0"})
        if parts == ["apis"]:
            groups = []
            for served_version in filter(lambda one: "/" in one, served):
                group, short = served_version.split("/")
                version = {"groupVersion": served_version, "version": short}
                groups.append({"name": group, "versions": [version], "preferredVersion": version})
            return self._send({"kind": "APIGroupList", "groups": groups})
        wanted = "/".join(parts[1:])
        if wanted not in served:
            return self._status(404, f"no {wanted}")
        verbs = ["create", "delete", "get", "list", "patch", "watch"]
        resources = [
            {"name": plural, "kind": kind, "namespaced": True, "singularName": "", "verbs": verbs}
            for plural, kind in served[wanted].items()
        ]
        self._send({"kind": "APIResourceList", "groupVersion": wanted, "resources": resources})

    def _create(self, plural: str, _: str, body: Any, query: Any) -> None:
        name = body["metadata"]["name"]
        if name in self.api.objects.get(plural, {}):
            return self._status(409, f'{plural} "{name}" already exists')
        self._send(self.api.put(plural, name, **body), 201)

    def _get(self, plural: str, name: str, body: Any, query: Any) -> None:
        found = self.api.objects.get(plural, {}).get(name)
        self._send(found) if found else self._status(404, f'{plural} "{name}" not found')

    def _patch(self, plural: str, name: str, body: Any, query: Any) -> None:
        assert self.headers["Content-Type"] == "application/merge-patch+json"
        self._send(self.api.put(plural, name, metadata=body["metadata"]))

    def _delete(self, plural: str, name: str, body: Any, query: Any) -> None:
        if name not in self.api.objects.get(plural, {}):
            return self._status(404, f'{plural} "{name}" not found')
        self.api.remove(plural, name)
        self._send({"kind": "Status", "status": "Success"})

    def _list(self, plural: str, name: str, body: Any, query: Any) -> None:
        with self.api.changed:
            items = [one for one in self.api.objects.get(plural, {}).values() if selected(one, query)]
            self._send({"kind": "List", "metadata": {"resourceVersion": str(self.api.version)}, "items": items})

    def _watch(self, plural: str, name: str, body: Any, query: dict[str, str]) -> None:
        version, epoch = int(query["resourceVersion"]), self.api.epoch
        self._open()
        if version < self.api.forgotten:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            self._chunk(json.dumps({"type": "ERROR", "object": gone}) + "\n")
            return self._chunk("")
        while True:
            with self.api.changed:
                news = [event for event in self.api.history if event[0] > version and event[1] == plural]
                if not news:
                    self.api.changed.wait(0.2)
                if self.api.epoch != epoch:
                    return self._cut('{"type": "MODIFIED", "obj')
            for at, _, kind, found in news:
                version = at
                if selected(found, query):
                    self._chunk(json.dumps({"type": kind, "object": found}) + "\n")

    def _log(self, pod: str, query: dict[str, str]) -> None:
        if pod not in self.api.logs:
            return self._status(400, f'container in pod "{pod}" is waiting to start')
        source, epoch = (self.api.previous_logs if "previous" in query else self.api.logs), self.api.epoch
        since, stamped = query.get("sinceTime", "")[:19], "timestamps" in query
        self._open()
        sent = max(0, len(source[pod]) - int(query.get("tailLines", 1_000_000)))
        while True:
            with self.api.changed:
                fresh, sent = source[pod][sent:], len(source[pod])
                ended = "follow" not in query or pod in self.api.log_ended
                if not fresh and not ended:
                    self.api.changed.wait(0.2)
                if self.api.epoch != epoch:
                    return self._cut("2026-01-01T00:00:")
            for stamp, line in fresh:
                if stamp[:19] >= since:
                    self._chunk(f"{stamp} {line}\n" if stamped else f"{line}\n")
            if ended:
                return self._chunk("")

    def _open(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _cut(self, half_a_line: str) -> None:
        self._chunk(half_a_line)
        self.close_connection = True

    def _status(self, code: int, message: str) -> None:
        self._send({"kind": "Status", "status": "Failure", "code": code, "message": message}, code)

    def _send(self, found: Any, code: int = 200) -> None:
        data = json.dumps(found).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def selected(found: dict[str, Any], query: dict[str, str]) -> bool:
    """Whether an object meets label and field selectors of equality."""
    labels = found["metadata"].get("labels") or {}
    for part in filter(None, query.get("labelSelector", "").split(",")):
        key, value = part.split("=")
        if labels.get(key) != value:
            return False
    for part in filter(None, query.get("fieldSelector", "").split(",")):
        key, value = part.split("=")
        if (found["metadata"]["name"] if key == "metadata.name" else found.get(key)) != value:
            return False
    return True


@pytest.fixture
def api() -> Iterator[ApiServer]:
    """A Kubernetes API server of the test's own."""
    server = ApiServer()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def kubeconfig(api, tmp_path, monkeypatch) -> None:
    """KUBECONFIG names a file that leads to the server."""
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": api.url}}], "users": [{"name": "test", "user": {}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }  # fmt: skip
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
