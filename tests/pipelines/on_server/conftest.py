"""A Kubeflow Pipelines API server over real HTTP, which holds each request and answer to KFP's own OpenAPI document."""

import json
import re
import threading
import time
import uuid
from collections.abc import Iterator
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import jsonschema
import pytest
import yaml

DOCUMENT = json.loads((Path(__file__).resolve().parents[2] / "data" / "kfp" / "v2beta1.json").read_text())
Object = dict[str, Any]


def closed(schema: Any, request: bool) -> Any:
    """A swagger schema as JSON schema without unknown members; a request holds nothing that only the server sets."""
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return closed(DOCUMENT["definitions"][schema["$ref"].rpartition("/")[2]], request)
    made = {key: value for key, value in schema.items() if key not in ("format", "readOnly")}
    if schema.get("format") == "int64":
        made["pattern"] = r"^-?\d+$"
    if schema.get("format") == "date-time":
        made["pattern"] = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)$"
    if "items" in schema:
        made["items"] = closed(schema["items"], request)
    if schema.get("properties"):
        inner = schema["properties"].items()
        made["properties"] = {
            name: closed(value, request)
            for name, value in inner
            if name not in RECURSIVE and not (request and value.get("readOnly"))
        }
        if schema.get("additionalProperties") != {}:
            made["additionalProperties"] = False
    return made


RECURSIVE = ("run_details", "state_history", "child_tasks")
"""Members that neither side of the tests sends."""


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class KfpServer:
    """Pipelines, versions, experiments, runs and recurring runs; and ways to break it.

    It does what the API server does as far as crosstrain may notice: unique names of experiments, pipelines and
    versions, run names that repeat, a namespace demanded in multi-user mode and refused otherwise.
    """

    def __init__(self) -> None:
        self.multi_user = False
        self.token = ""
        """demanded of each request, if not empty"""
        self.tables: dict[str, dict[str, Object]] = {
            name: {} for name in ("experiments", "pipelines", "versions", "runs", "recurringruns")
        }
        self.requests: list[tuple[str, str]] = []
        """method and path"""
        self.violations: list[str] = []
        """what KFP's document would not allow"""
        self.faults: dict[tuple[str, str], tuple[int, bytes]] = {}
        """method and end of path to status and body; 0: no answer at all"""
        self.reached: dict[tuple[str, str], threading.Event] = {}
        """method and end of path, to what tells that a request for it has come; it is then never answered"""
        self.meetings: dict[tuple[str, str], threading.Barrier] = {}
        """method and end of path, to where the first requests for it wait until all of them have come"""
        self.delays: dict[tuple[str, str], float] = {}
        """method and end of path, to seconds before anything is done"""
        self.page_size = 100
        self.lock = threading.RLock()
        self.open = threading.Event()
        handler = type("Handler", (_Handler,), {"api": self})
        self.http = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.open.set()
        self.http.shutdown()
        self.http.server_close()

    @property
    def runs(self) -> list[Object]:
        return list(self.tables["runs"].values())

    @property
    def schedules(self) -> list[Object]:
        return list(self.tables["recurringruns"].values())

    def posts(self) -> list[str]:
        return [path for method, path in self.requests if method == "POST"]

    def _insert(self, table: str, identity: str, body: Object, unique: tuple[str, ...] = ()) -> Object:
        known = self.tables[table].values()
        if unique and any(all(item.get(name) == body.get(name) for name in unique) for item in known):
            raise Refused(409, f"AlreadyExistError: {body.get(unique[0])} already exists")
        made = {**body, identity: str(uuid.uuid4()), "created_at": "2026-01-01T00:00:00Z"}
        self.tables[table][made[identity]] = made
        return made

    def _get(self, table: str, identity: str) -> Object:
        if identity not in self.tables[table]:
            raise Refused(404, f"ResourceNotFoundError: {table} {identity} not found")
        return self.tables[table][identity]

    def _list(self, table: str, member: str, query: dict[str, str], **match: str) -> Object:
        items = [item for item in self.tables[table].values() if all(item.get(k) == v for k, v in match.items())]
        for predicate in json.loads(query.get("filter", "{}")).get("predicates", []):
            assert predicate["operation"] == "EQUALS"
            items = [item for item in items if item.get(predicate["key"]) == predicate["stringValue"]]
        start = int(query.get("page_token", "0"))
        end = start + min(self.page_size, int(query.get("page_size", "10")))
        return {member: items[start:end], **({"next_page_token": str(end)} if end < len(items) else {})}

    def _check_namespace(self, given: str) -> None:
        if self.multi_user and not given:
            raise Refused(400, "Invalid input error: namespace cannot be empty")
        if given and not self.multi_user:
            raise Refused(400, "Invalid input error: In single-user mode, namespace cannot be specified")

    def healthz(self, query: Object, body: Any) -> Object:
        return {"multi_user": self.multi_user}

    def list_experiments(self, query: Object, body: Any) -> Object:
        self._check_namespace(query.get("namespace", ""))
        return self._list("experiments", "experiments", query)

    def create_experiment(self, query: Object, body: Any) -> Object:
        self._check_namespace(body.get("namespace", ""))
        return self._insert("experiments", "experiment_id", body, ("display_name", "namespace"))

    def get_pipeline_by_name(self, query: Object, body: Any, name: str) -> Object:
        found = [item for item in self.tables["pipelines"].values() if item["name"] == name]
        if not found:
            raise Refused(404, f"ResourceNotFoundError: Pipeline {name} not found")
        return found[0]

    def create_pipeline(self, query: Object, body: Any) -> Object:
        self._check_namespace(body.get("namespace", ""))
        return self._insert("pipelines", "pipeline_id", body, ("name", "namespace"))

    def list_versions(self, query: Object, body: Any, pipeline_id: str) -> Object:
        return self._list("versions", "pipeline_versions", query, pipeline_id=pipeline_id)

    def upload_version(self, query: Object, body: bytes) -> Object:
        self._get("pipelines", query["pipelineid"])
        made = {
            "pipeline_id": query["pipelineid"],
            "name": query["name"],
            "display_name": query.get("display_name", query["name"]),
            "pipeline_spec": yaml.safe_load(body),
        }
        return self._insert("versions", "pipeline_version_id", made, ("name", "pipeline_id"))

    def list_runs(self, query: Object, body: Any) -> Object:
        self._check_namespace(query.get("namespace", ""))
        return self._list("runs", "runs", query)

    def get_run(self, query: Object, body: Any, run_id: str) -> Object:
        return self._get("runs", run_id)

    def create_run(self, query: Object, body: Any) -> Object:
        self._get("experiments", body["experiment_id"])
        self._get("versions", body["pipeline_version_reference"]["pipeline_version_id"])
        return self._insert("runs", "run_id", {**body, "state": "PENDING"})

    def list_schedules(self, query: Object, body: Any) -> Object:
        return self._list("recurringruns", "recurringRuns", query)

    def create_schedule(self, query: Object, body: Any) -> Object:
        self._get("experiments", body["experiment_id"])
        status = {"DISABLE": "DISABLED", "ENABLE": "ENABLED"}[body["mode"]]
        return self._insert("recurringruns", "recurring_run_id", {**body, "status": status})

    def switch(self, status: str) -> Any:
        def act(query: Object, body: Any, recurring_run_id: str) -> Object:
            self._get("recurringruns", recurring_run_id)["status"] = status
            return {}

        return act


OPERATIONS = {
    "HealthzService_GetHealthz": "healthz",
    "ExperimentService_ListExperiments": "list_experiments",
    "ExperimentService_CreateExperiment": "create_experiment",
    "PipelineService_GetPipelineByName": "get_pipeline_by_name",
    "PipelineService_CreatePipeline": "create_pipeline",
    "PipelineService_ListPipelineVersions": "list_versions",
    "UploadPipelineVersion": "upload_version",
    "RunService_ListRuns": "list_runs",
    "RunService_GetRun": "get_run",
    "RunService_CreateRun": "create_run",
    "RecurringRunService_ListRecurringRuns": "list_schedules",
    "RecurringRunService_CreateRecurringRun": "create_schedule",
}
SWITCHES = {"RecurringRunService_DisableRecurringRun": "DISABLED", "RecurringRunService_EnableRecurringRun": "ENABLED"}


def find_operation(method: str, path: str) -> tuple[Object, dict[str, str]]:
    """The document's operation for a request, the most literal first, and its path parameters."""
    for template in sorted(DOCUMENT["paths"], key=lambda text: text.count("{")):
        names = re.findall(r"\{([\w.]+)\}", template)
        pattern = "([^/:]+)".join(re.escape(part) for part in re.split(r"\{[\w.]+\}", template))
        found = re.fullmatch(pattern, path)
        if found and method.lower() in DOCUMENT["paths"][template]:
            values = dict(zip(names, map(unquote, found.groups()), strict=True))
            return DOCUMENT["paths"][template][method.lower()], values
    raise Refused(404, f"{method} {path} is no operation of the API")


def check_request(operation: Object, query: dict[str, str], content_type: str, raw: bytes) -> Any:
    """The body of a request, or Refused when the document does not allow the request."""
    declared = {item["name"]: item for item in operation.get("parameters", ())}
    for name, value in query.items():
        if declared.get(name, {}).get("in") != "query":
            raise Refused(400, f"unknown query parameter {name}")
        if declared[name]["type"] == "integer" and not value.isdigit():
            raise Refused(400, f"{name} is no integer")
    forms = [name for name, item in declared.items() if item["in"] == "formData"]
    bodies = [item for item in declared.values() if item["in"] == "body"]
    if forms:
        message = message_from_bytes(b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + raw)
        parts = {part.get_param("name", header="content-disposition"): part for part in message.get_payload()}
        if set(parts) != set(forms):
            raise Refused(400, f"form fields {sorted(parts)} instead of {forms}")
        return parts[forms[0]].get_payload(decode=True)
    if not bodies:
        if raw:
            raise Refused(400, "a body where none belongs")
        return None
    if content_type != "application/json":
        raise Refused(400, f"content type {content_type}")
    body = json.loads(raw)
    jsonschema.Draft202012Validator(closed(bodies[0]["schema"], request=True)).validate(body)
    return body


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: KfpServer

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def _serve(self, method: str) -> None:
        address = urlsplit(self.path)
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        api = self.api
        with api.lock:
            api.requests.append((method, address.path))
        for (verb, ending), reached in list(api.reached.items()):
            if verb == method and address.path.endswith(ending):
                reached.set()
                api.open.wait(60)
                return
        for (verb, ending), meeting in list(api.meetings.items()):
            if verb == method and address.path.endswith(ending):
                meeting.wait(60)
                api.meetings.pop((verb, ending), None)
        for (verb, ending), seconds in api.delays.items():
            if verb == method and address.path.endswith(ending):
                time.sleep(seconds)
        for (verb, ending), (status, data) in list(api.faults.items()):
            if verb == method and address.path.endswith(ending):
                if not status:
                    api.open.wait(60)
                    return
                return self._send(status, data)
        if api.token and self.headers.get("Authorization") != f"Bearer {api.token}":
            return self._send(401, b'{"code":16,"message":"Request header error: there is no user identity header."}')
        try:
            self._send(
                200, json.dumps(self._answer(method, address.path, dict(parse_qsl(address.query)), raw)).encode()
            )
        except Refused as refused:
            self._send(refused.status, json.dumps({"code": 3, "message": refused.message, "details": []}).encode())

    def _answer(self, method: str, path: str, query: dict[str, str], raw: bytes) -> Object:
        try:
            operation, values = find_operation(method, path)
            body = check_request(operation, query, self.headers.get("Content-Type", ""), raw)
        except (Refused, jsonschema.ValidationError, ValueError) as error:
            self.api.violations.append(f"{method} {path}: {error}")
            raise Refused(400, f"Invalid input error: {error}") from None
        name = operation["operationId"]
        act = self.api.switch(SWITCHES[name]) if name in SWITCHES else getattr(self.api, OPERATIONS[name])
        with self.api.lock:
            answer = json.loads(json.dumps(act(query, body, **values)))
        jsonschema.Draft202012Validator(closed(operation["responses"]["200"]["schema"], request=False)).validate(answer)
        return dict(answer)

    def _send(self, status: int, data: bytes) -> None:
        time.sleep(0)
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if 300 <= status < 400:
                self.send_header("Location", "/dex/auth")
            self.end_headers()
            self.wfile.write(data)
        except ConnectionError:
            self.close_connection = True


@pytest.fixture
def kfp() -> Iterator[KfpServer]:
    """A server of the test's own; every request it got was one that KFP's document allows."""
    server = KfpServer()
    try:
        yield server
        assert server.violations == []
    finally:
        server.close()


@pytest.fixture(autouse=True)
def no_kubeflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this machine's own names a server or a token."""
    for name in (
        "KF_PIPELINES_ENDPOINT",
        "KF_PIPELINES_SA_TOKEN_PATH",
        "KF_PIPELINES_TOKEN",
        "KUBERNETES_SERVICE_HOST",
    ):
        monkeypatch.delenv(name, raising=False)
