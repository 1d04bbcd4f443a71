"""The Kubernetes API as a launcher needs it: bounded calls that survive a flaky network, and refusals in plain words.

Kinds are looked up by API discovery, because clusters spell one of ours differently. A watch is a thread that
lists, watches from there, comes back after a dropped connection where it left off, and lists anew when the
server has forgotten that place (410 Gone).
"""

import json
import logging
import os
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import urllib3
from kubernetes.client import ApiClient, ApiException, Configuration
from kubernetes.config import load_incluster_config, load_kube_config
from kubernetes.config.config_exception import ConfigException
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import ResourceNotFoundError
from kubernetes.dynamic.resource import Resource
from kubernetes.watch.watch import iter_resp_lines

log = logging.getLogger(__name__)

T = TypeVar("T")
Object = dict[str, Any]

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
KUBECONFIG_VARIABLE = "KUBECONFIG"
REQUEST_SECONDS = (5.0, 30.0)
"""Connect and read time-out of a call."""
WATCH_SECONDS = 60
"""After which the server ends a watch, so that a connection that died silently is noticed."""
TRIES = 5
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
PASSING = {429, 500, 502, 503, 504}
"""Statuses that are worth another try."""

BROKEN = (urllib3.exceptions.HTTPError, OSError, json.JSONDecodeError)
"""What a dropped or refused connection raises; JSON errors come of a line cut short."""


class Refused(RuntimeError):
    """The API server refused for good; `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Changed:
    """One change that a watch saw."""

    topic: str
    object: Object
    deleted: bool = False


@dataclass(frozen=True)
class Listed:
    """Everything there is, at the start and after a gap: what is not in it is gone."""

    topic: str
    objects: list[Object]


@dataclass(frozen=True)
class Broke:
    """A watch ended because the server refused it."""

    topic: str
    error: Exception


class Inbox(queue.SimpleQueue[Any]):
    """Where watches and signal handlers leave what happened."""


def pauses() -> Iterator[float]:
    """Seconds to wait before each further try, doubling."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


class Cluster:
    """One namespace of a cluster."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self.namespace = namespace
        self._discovered = tempfile.TemporaryDirectory(prefix="crosstrain-discovery-")
        cache = str(Path(self._discovered.name) / "resources.json")
        self.dynamic = self._attempt(lambda: DynamicClient(client, cache_file=cache), "reach the API server")

    @classmethod
    def connect(cls, namespace: str) -> "Cluster":
        """Connect by the kubeconfig that KUBECONFIG names, else the pod's account, else the user's own kubeconfig.

        Args:
            namespace: Where jobs go; empty: the pod's own namespace.

        Raises:
            ValueError: neither a service account nor a kubeconfig, or no namespace.
        """
        configuration = Configuration()
        kubeconfig = os.environ.get(KUBECONFIG_VARIABLE)
        try:
            if kubeconfig or not own_namespace():
                load_kube_config(config_file=kubeconfig, client_configuration=configuration)
            else:
                load_incluster_config(client_configuration=configuration)
        except ConfigException as error:
            raise ValueError(f"no Kubernetes cluster to submit to: {error}") from None
        namespace = namespace or own_namespace()
        if not namespace:
            raise ValueError("run_on.namespace: not given, and this is no pod that has one of its own")
        return cls(ApiClient(configuration), namespace)

    def resource(self, api_version: str, plural: str, hint: str) -> Resource:
        """A resource by its plural name, as the cluster spells its kind.

        Raises:
            ValueError: the cluster has no such resource; `hint` says what would bring it.
        """
        wanted = {"api_version": api_version, "name": plural}

        def find() -> Resource:
            return self.dynamic.resources.get(**wanted)

        try:
            return self._attempt(find, f"discover {plural}")
        except ResourceNotFoundError:
            raise ValueError(f"the cluster has no {plural} ({api_version}): {hint}") from None

    def create(self, resource: Resource, body: Object) -> Object:
        """Create an object; raises Refused(409) if its name is taken."""
        return self._call("create", resource, "post", namespace=self.namespace, body=body)

    def get(self, resource: Resource, name: str) -> Object:
        """Read an object; raises Refused(404) if there is none."""
        return self._call("get", resource, "get", name=name, namespace=self.namespace)

    def list(self, resource: Resource, **selectors: str) -> Object:
        """A list object: `items` and the list's `metadata`."""
        return self._call("list", resource, "get", namespace=self.namespace, **selectors)

    def merge(self, resource: Resource, name: str, patch: Object) -> Object:
        """Apply a JSON merge patch."""
        merge = "application/merge-patch+json"
        return self._call(
            "patch", resource, "patch", name=name, namespace=self.namespace, body=patch, content_type=merge
        )

    def delete(self, resource: Resource, name: str) -> None:
        """Delete an object and what it owns; nothing happens if it is gone."""
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        try:
            self._call("delete", resource, "delete", name=name, namespace=self.namespace, body=options)
        except Refused as refusal:
            if refusal.status != 404:
                raise

    def may(self, verb: str, group: str, resource: str) -> bool:
        """Whether this account may do something in the namespace, by the cluster's own word.

        Args:
            verb: "create".
            group: API group; empty: the core's.
            resource: Plural, with a subresource after a slash: "pods/log".
        """
        plural, _, part = resource.partition("/")
        asked = {"namespace": self.namespace, "verb": verb, "group": group, "resource": plural, "subresource": part}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": asked}}  # fmt: skip
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"

        def send() -> bool:
            response = self.dynamic.request("post", path, body=body, serialize=False, _request_timeout=REQUEST_SECONDS)
            return bool(json.loads(response.data)["status"]["allowed"])

        return self._attempt(send, "create selfsubjectaccessreviews")

    def log(self, pod: str, query: Mapping[str, str], read_seconds: float = REQUEST_SECONDS[1]) -> Iterator[str]:
        """Lines of a container's log; with `follow` until it ends.

        Raises:
            Refused: no such pod or container, or it has not started.
            urllib3.exceptions.HTTPError: the connection broke, or nothing came for `read_seconds`.
        """
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log"
        try:
            response = self.dynamic.request(
                "get", path, query_params=list(query.items()), header_params={"Accept": "*/*"},
                serialize=False, _request_timeout=(REQUEST_SECONDS[0], read_seconds),
            )  # fmt: skip
        except ApiException as error:
            raise self._refusal(error, "get", "pods/log", "") from None
        try:
            yield from iter_resp_lines(response)
        finally:
            response.close()

    def watch(self, topic: str, resource: Resource, inbox: Inbox, stop: threading.Event, **selectors: str) -> None:
        """Start a thread that reports changes of the selected objects to the inbox until `stop` is set."""
        arguments = (topic, resource, inbox, stop, selectors)
        threading.Thread(target=self._watch, args=arguments, daemon=True, name=f"watch-{topic}").start()

    def _watch(
        self, topic: str, resource: Resource, inbox: Inbox, stop: threading.Event, selectors: dict[str, str]
    ) -> None:
        version, waits = "", pauses()
        while not stop.is_set():
            try:
                if not version:
                    found = self.list(resource, **selectors)
                    version = found["metadata"]["resourceVersion"]
                    inbox.put(Listed(topic, found["items"]))
                for event in self._events(resource, version, selectors):
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        inbox.put(Changed(topic, event["object"], deleted=event["type"] == "DELETED"))
                    waits = pauses()
                    if stop.is_set():
                        return
            except Refused as refusal:
                if refusal.status == 410:
                    version = ""
                elif refusal.status not in PASSING:
                    inbox.put(Broke(topic, refusal))
                    return
                stop.wait(next(waits))
            except PermissionError as error:
                inbox.put(Broke(topic, error))
                return
            except BROKEN as error:
                if stop.is_set():
                    return
                log.info("watch of %s broke (%s); going on", resource.name, type(error).__name__)
                stop.wait(next(waits))

    def _events(self, resource: Resource, version: str, selectors: Mapping[str, str]) -> Iterator[Object]:
        try:
            response = resource.get(
                namespace=self.namespace, watch="true", resource_version=version, timeout_seconds=WATCH_SECONDS,
                query_params=[("allowWatchBookmarks", "true")], serialize=False,
                _request_timeout=(REQUEST_SECONDS[0], WATCH_SECONDS + 15), **selectors,
            )  # fmt: skip
        except ApiException as error:
            raise self._refusal(error, "watch", resource.name, resource.group) from None
        try:
            for line in iter_resp_lines(response):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise Refused(int(status.get("code", 500)), status.get("message", "watch failed"))
                yield event
        finally:
            response.close()

    def _call(self, verb: str, resource: Resource, method: str, **arguments: Any) -> Object:
        names = {key: arguments.pop(key) for key in ("name", "namespace") if key in arguments}
        path = resource.path(**names)

        def send() -> Object:
            response = self.dynamic.request(
                method, path, serialize=False, _request_timeout=REQUEST_SECONDS, **arguments
            )
            decoded: Object = json.loads(response.data)
            return decoded

        return self._attempt(send, verb, resource)

    def _attempt(self, act: Callable[[], T], verb: str, resource: Resource | None = None) -> T:
        """Do it, again after a passing fault, a bounded number of times."""
        waits = pauses()
        for left in reversed(range(TRIES)):
            try:
                return act()
            except ApiException as error:
                if error.status not in PASSING or not left:
                    name, group = (resource.name, resource.group) if resource is not None else ("", "")
                    raise self._refusal(error, verb, name, group) from None
            except BROKEN as error:
                if not left:
                    raise ConnectionError(f"could not {verb}: {error}") from error
            threading.Event().wait(next(waits))
        raise AssertionError("the last try returns or raises")

    def _refusal(self, error: ApiException, verb: str, plural: str, group: str) -> Exception:
        """An API error as what the step reports: PermissionError for missing rights, else Refused."""
        message = error.reason or ""
        try:
            message = json.loads(error.body)["message"]
        except (TypeError, ValueError, KeyError):
            message = str(error.body or message)
        if error.status == 401 or (error.status == 403 and "exceeded quota" not in message and plural):
            what = f"{plural} of {group}" if group else plural
            return PermissionError(
                f"the step may not {verb} {what} in namespace {self.namespace}: bind its service account to a Role "
                f"with apiGroups [{group or chr(34) * 2}], resources [{plural}], verbs [{verb}] ({message})"
            )
        return Refused(error.status or 0, message)


def own_namespace() -> str:
    """The namespace of the pod this runs in; empty outside of one."""
    return NAMESPACE_FILE.read_text(encoding="utf-8").strip() if NAMESPACE_FILE.is_file() else ""
