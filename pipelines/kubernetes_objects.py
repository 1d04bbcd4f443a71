"""A compiled pipeline as Kubernetes objects: Pipeline and PipelineVersion of `pipelines.kubeflow.org/v2beta1`.

For a KFP server that keeps its pipelines in Kubernetes (`--pipelinesStoreKubernetes=true`). A version's spec cannot
be changed, so its name holds the hash of what it was made from, and GitOps tools are told never to prune it: recurring
runs would lose it. Kustomize does not rewrite images inside a version, so they must be digests before. Left out on
purpose: runs, for which KFP has no kind.
"""

from collections.abc import Mapping
from typing import Any

import yaml

from crosstrain.pipelines.kfp_api import version_name
from crosstrain.pipelines.spec import Pipeline

API_VERSION = "pipelines.kubeflow.org/v2beta1"
LARGEST_OBJECT = 1_000_000
"""Bytes of one object as JSON that Kubernetes' own store surely takes (its limit is 1.5 MiB a request)."""

KEPT = {
    "argocd.argoproj.io/sync-options": "Prune=false,ServerSideApply=true",
    "kustomize.toolkit.fluxcd.io/prune": "disabled",
}
"""Annotations that keep a version when its file goes, and apply it without a copy of itself in an annotation."""


def render(pipeline: Pipeline, namespace: str = "", allow_tags: bool = False) -> list[dict[str, Any]]:
    """The two objects.

    Args:
        pipeline: As compiled.
        namespace: Put into the metadata; empty: left to whoever applies them.
        allow_tags: Take images that are named by a tag, which may change behind the version's back.

    Raises:
        ValueError: an image has no digest, or the version is too large for Kubernetes.
    """
    tagged = sorted(image for image in images(pipeline.document) if "@sha256:" not in image)
    if tagged and not allow_tags:
        raise ValueError(
            f"{pipeline.name}: not pinned by digest: {', '.join(tagged)}; write down what was pushed with "
            "`python images/lock.py publish`, then `crosstrain compile`; --allow-tags takes them as they are"
        )
    name = version_name(pipeline)
    version: dict[str, Any] = {
        "displayName": name,
        "pipelineName": pipeline.name,
        "pipelineSpec": pipeline.document,
    }
    if pipeline.platform:
        version["platformSpec"] = pipeline.platform
    if pipeline.description:
        version["description"] = pipeline.description
    made = [
        _object("Pipeline", pipeline.name, namespace, {"displayName": pipeline.name}),
        _object("PipelineVersion", name, namespace, version),
    ]
    if pipeline.description:
        made[0]["spec"]["description"] = pipeline.description
    if (size := len(dump(made[1:]).encode())) > LARGEST_OBJECT:
        raise ValueError(f"{pipeline.name}: {size} bytes are too many for one Kubernetes object; upload it instead")
    return made


def images(document: Mapping[str, Any]) -> set[str]:
    """The container images of a compiled pipeline."""
    executors = document["deploymentSpec"].get("executors", {}).values()
    return {executor["container"]["image"] for executor in executors if "container" in executor}


def dump(objects: list[dict[str, Any]]) -> str:
    """Objects as YAML documents."""
    return yaml.safe_dump_all(objects, sort_keys=True, width=120)


def _object(kind: str, name: str, namespace: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "annotations": dict(KEPT)}
    if namespace:
        metadata["namespace"] = namespace
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}
