"""Compiled pipelines as Kubernetes objects: valid by KFP's own definitions, and what KFP's own compiler writes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from crosstrain.pipelines import compile as compiling
from crosstrain.pipelines import kubernetes_objects, spec
from crosstrain.pipelines.cli import main

DIGEST = "@sha256:" + "ab" * 32


def pinned(name: str) -> spec.Pipeline:
    """A committed pipeline as it is compiled once its images are published."""
    pipeline = spec.load(name)
    data = pipeline.data
    for image in kubernetes_objects.images(pipeline.document):
        data = data.replace(image.encode(), (image + DIGEST).encode())
    return spec.parse(data, name)


@pytest.mark.parametrize("name", spec.committed())
def test_objects_are_valid(name: str, validate: Callable[[Any], None]) -> None:
    pipeline, version = kubernetes_objects.render(pinned(name), namespace="team-a")
    for made in (pipeline, version):
        validate(made)
        assert made["metadata"]["namespace"] == "team-a"
        assert made["metadata"]["annotations"]["kustomize.toolkit.fluxcd.io/prune"] == "disabled"
        assert "Prune=false" in made["metadata"]["annotations"]["argocd.argoproj.io/sync-options"]
        assert made["spec"]["description"]
    assert version["spec"]["pipelineName"] == pipeline["metadata"]["name"]
    assert len(version["metadata"]["name"]) <= 63  # a label's length: KFP puts the name into labels


@pytest.mark.parametrize("name", compiling.PIPELINES)
def test_the_version_is_what_kfps_own_compiler_writes(name: str, tmp_path: Path) -> None:
    from kfp.compiler import Compiler
    from kfp.compiler.compiler_utils import KubernetesManifestOptions

    function = compiling._load(f"crosstrain.pipelines.{name}", name)
    ours = kubernetes_objects.render(spec.load(name), namespace="n", allow_tags=True)
    options = KubernetesManifestOptions(
        pipeline_version_name=ours[1]["metadata"]["name"], namespace="n", include_pipeline_manifest=True
    )
    Compiler().compile(
        function,
        str(tmp_path / "x.yaml"),
        kubernetes_manifest_format=True,
        kubernetes_manifest_options=options,
    )
    theirs = list(yaml.safe_load_all((tmp_path / "x.yaml").read_text()))
    for made, other in zip(ours, theirs, strict=True):
        assert (made["apiVersion"], made["kind"]) == (other["apiVersion"], other["kind"])
        assert made["metadata"]["name"] == other["metadata"]["name"]
    for field in ("pipelineName", "pipelineSpec", "platformSpec"):
        assert ours[1]["spec"].get(field, {}) == theirs[1]["spec"].get(field, {})


def test_another_content_is_another_version() -> None:
    before = pinned("finetune")
    after = spec.parse(before.data.replace(b"defaultValue: 100", b"defaultValue: 101"), "x")
    names = [kubernetes_objects.render(one)[1]["metadata"]["name"] for one in (before, after)]
    assert names[0] != names[1]
    assert names[0] == f"finetune-{before.sha256[:12]}"


def test_images_without_a_digest_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compile", "finetune", "--kubernetes"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "crosstrain/gpu-python:0.1.0" in error
    assert "images/lock.py publish" in error


def test_the_command_prints_the_objects(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compile", "finetune", "--kubernetes", "--allow-tags", "--namespace", "team-b"])
    assert ended.value.code == 0
    made = list(yaml.safe_load_all(capsys.readouterr().out))
    assert made == kubernetes_objects.render(spec.load("finetune"), "team-b", allow_tags=True)


def test_the_platforms_part_goes_along_and_a_version_that_is_too_large_is_refused() -> None:
    pipeline = pinned("finetune")
    platform = {"platforms": {"kubernetes": {"deploymentSpec": {}}}}
    made = kubernetes_objects.render(replace(pipeline, platform=platform))
    assert made[1]["spec"]["platformSpec"] == platform
    huge = replace(pipeline, document={**pipeline.document, "filler": "x" * kubernetes_objects.LARGEST_OBJECT})
    with pytest.raises(ValueError, match="too many for one Kubernetes object"):
        kubernetes_objects.render(huge)
