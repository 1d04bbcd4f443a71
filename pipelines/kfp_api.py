"""What crosstrain asks of Kubeflow Pipelines: experiments, pipeline versions, runs and recurring runs, by name.

A pipeline version is named by its content, `<pipeline>-<first 12 of SHA-256>`, so that the same YAML is uploaded
once, whoever comes first. A run is never given an id of ours: the server starts its workflow before it stores the
run, and a second try would start an orphan. Left out: deleting anything.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from crosstrain.pipelines import spec
from crosstrain.pipelines.kfp_http import ApiError, Connection, segment
from crosstrain.pipelines.spec import Pipeline

NAMESPACE_PATH = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
ENDED = ("SUCCEEDED", "SKIPPED", "FAILED", "CANCELED")

Object = dict[str, Any]


def version_name(pipeline: Pipeline) -> str:
    """The name of a compiled pipeline's version: its content's."""
    return f"{pipeline.name}-{pipeline.sha256[:12]}"


@dataclass(frozen=True)
class Version:
    """A pipeline version on the server."""

    name: str
    pipeline_id: str
    version_id: str
    spec: Object
    """The compiled pipeline as the server has it; empty when it was not returned."""

    @property
    def reference(self) -> Object:
        return {"pipeline_id": self.pipeline_id, "pipeline_version_id": self.version_id}

    def pipeline(self) -> Pipeline:
        """The compiled pipeline, read from the server's copy."""
        document = self.spec.get("pipeline_spec") or self.spec
        return spec.parse(json.dumps(document).encode(), f"pipeline version {self.name}")


@dataclass(frozen=True)
class Work:
    """What a run or a recurring run is to do."""

    display_name: str
    experiment_id: str
    version: Version
    parameters: Mapping[str, Any]
    description: str = ""
    service_account: str = ""
    pipeline_root: str = ""


class Api:
    """The server, seen from one namespace.

    Args:
        connection: Where and as whom.
        namespace: Namespace of a multi-user installation; empty: this pod's own there, none elsewhere.
    """

    def __init__(self, connection: Connection, namespace: str = "") -> None:
        self.connection = connection
        self._namespace = namespace

    @cached_property
    def multi_user(self) -> bool:
        """Whether the installation keeps namespaces apart."""
        return bool(self.connection.get("/healthz").get("multi_user"))

    @cached_property
    def namespace(self) -> str:
        """The namespace that requests name; a single-user server refuses any.

        Raises:
            ValueError: a multi-user server, and no namespace is known.
        """
        if not self.multi_user:
            return ""
        if self._namespace:
            return self._namespace
        if NAMESPACE_PATH.is_file():
            return NAMESPACE_PATH.read_text(encoding="utf-8").strip()
        raise ValueError(f"{self.connection.host}: this Kubeflow has many users; give --namespace")

    @property
    def identity(self) -> str:
        """The namespace as it enters the key of a run file: what was given counts on a single-user server too."""
        return self.namespace or self._namespace

    def experiment(self, name: str) -> str:
        """The id of the experiment of this name, made when there is none."""
        return self._found_experiment(name) or self._made(
            lambda: self.connection.post("/experiments", _given(display_name=name, namespace=self.namespace)),
            "experiment_id",
            lambda: self._found_experiment(name),
        )

    def _found_experiment(self, name: str) -> str:
        found = self.connection.pages("/experiments", "experiments", namespace=self.namespace, filter=_named(name))
        return next((item["experiment_id"] for item in found if item.get("display_name") == name), "")

    def find_version(self, pipeline_name: str, name: str) -> Version | None:
        """The pipeline version of this name, if the server has it."""
        pipeline_id = self._found_pipeline(pipeline_name)
        return self._found_version(pipeline_id, name) if pipeline_id else None

    def ensure_version(self, pipeline: Pipeline) -> Version:
        """The version of these very bytes, uploaded when absent."""
        name = version_name(pipeline)
        pipeline_id = self._found_pipeline(pipeline.name) or self._made(
            lambda: self.connection.post(
                "/pipelines",
                _given(
                    name=pipeline.name,
                    display_name=pipeline.name,
                    description=pipeline.description,
                    namespace=self.namespace,
                ),
            ),
            "pipeline_id",
            lambda: self._found_pipeline(pipeline.name),
        )
        found = self._found_version(pipeline_id, name)
        if found is not None:
            return found
        self._made(
            lambda: self.connection.upload(
                "/pipelines/upload_version",
                f"{name}.yaml",
                pipeline.data,
                name=name,
                display_name=name,
                pipelineid=pipeline_id,
                description=f"sha256:{pipeline.sha256}",
            ),
            "pipeline_version_id",
            lambda: getattr(self._found_version(pipeline_id, name), "version_id", ""),
        )
        uploaded = self._found_version(pipeline_id, name)
        if uploaded is None:
            raise ApiError(f"{self.connection.host}: took pipeline version {name} and does not list it", retry=True)
        return uploaded

    def _found_pipeline(self, name: str) -> str:
        try:
            found = self.connection.get(f"/pipelines/names/{segment(name)}", namespace=self.namespace)
        except ApiError as error:
            if error.status == 404:
                return ""
            raise
        return str(found["pipeline_id"])

    def _found_version(self, pipeline_id: str, name: str) -> Version | None:
        path = f"/pipelines/{segment(pipeline_id)}/versions"
        for item in self.connection.pages(path, "pipeline_versions", filter=_named(name)):
            if name in (item.get("name"), item.get("display_name")):
                return Version(name, pipeline_id, item["pipeline_version_id"], item.get("pipeline_spec") or {})
        return None

    def _made(self, make: Any, member: str, find: Any) -> str:
        """The id of what was made; found instead when another submitter made it in this moment (409)."""
        try:
            return str(make()[member])
        except ApiError as error:
            found = find() if error.status == 409 else ""
            if not found:
                raise
            return str(found)

    def runs_named(self, display_name: str) -> list[Object]:
        """Every run of this name, archived ones included."""
        found = self.connection.pages("/runs", "runs", namespace=self.namespace, filter=_named(display_name))
        return [run for run in found if run.get("display_name") == display_name]

    def run(self, run_id: str) -> Object:
        """One run."""
        return self.connection.get(f"/runs/{segment(run_id)}")

    def create_run(self, work: Work) -> str:
        """Start a run; its id."""
        return str(self.connection.post("/runs", self._body(work))["run_id"])

    def schedules(self) -> Iterator[Object]:
        """Every recurring run of the namespace."""
        return self.connection.pages("/recurringruns", "recurringRuns", namespace=self.namespace)

    def create_schedule(self, work: Work, trigger: Object, max_concurrency: int, catchup: bool) -> str:
        """Make a recurring run, paused; its id."""
        body = {
            **self._body(work),
            "trigger": trigger,
            "max_concurrency": str(max_concurrency),
            "no_catchup": not catchup,
            "mode": "DISABLE",
        }
        return str(self.connection.post("/recurringruns", body)["recurring_run_id"])

    def pause(self, recurring_run_id: str) -> None:
        """Stop a schedule from starting runs."""
        self.connection.post(f"/recurringruns/{segment(recurring_run_id)}:disable")

    def enable(self, recurring_run_id: str) -> None:
        """Let a schedule start runs."""
        self.connection.post(f"/recurringruns/{segment(recurring_run_id)}:enable")

    def _body(self, work: Work) -> Object:
        return _given(
            display_name=work.display_name,
            description=work.description,
            experiment_id=work.experiment_id,
            pipeline_version_reference=work.version.reference,
            runtime_config={"parameters": dict(work.parameters), **_given(pipeline_root=work.pipeline_root)},
            service_account=work.service_account,
        )

    def url(self, run_id: str) -> str:
        """Where the UI shows a run, if the host serves the UI."""
        return f"{self.connection.host}/#/runs/details/{run_id}"


def _given(**members: Any) -> Object:
    return {name: value for name, value in members.items() if value}


def _named(name: str) -> str:
    return json.dumps({"predicates": [{"key": "display_name", "operation": "EQUALS", "stringValue": name}]})
