"""docs/hyperpod.md: every command in it is run, or checked against the tool's own options or AWS's model."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore import xform_name
from botocore.model import OperationModel, Shape

from crosstrain.components.core.cost import load_prices
from crosstrain.components.core.launch.job import RunOn
from crosstrain.pipelines import parameters, run_file, spec

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "hyperpod.md"
RUNS = ROOT / "manifests" / "overlays" / "hyperpod" / "runs"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACEHOLDERS = {"sha256:DIGEST": "sha256:" + "ab" * 32}
GLOBAL_AWS_OPTIONS = {"region"}
Operation = Callable[[str, str], OperationModel]
Refusals = Callable[[OperationModel, Any], list[str]]
Build = Callable[[Path], Any]


def blocks(language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(PAGE.read_text()) if found == language]


COMMANDS = [line for text in blocks("bash") for line in text.splitlines() if line.strip()]


def options(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each `--option` with the words up to the next one."""
    at = [index for index, word in enumerate(words) if word.startswith("-")]
    for start, end in zip(at, [*at, len(words)][1:], strict=True):
        name, _, value = words[start].lstrip("-").partition("=")
        yield name, ([value] if value else []) + words[start + 1 : end]


def parameter(shape: Shape, words: list[str]) -> Any:
    """A command line's text as the API takes it: numbers for numbers, a file's text for file://."""
    (text,) = words
    if text.startswith("file://"):
        return (ROOT / text.removeprefix("file://")).read_text()
    return int(text) if shape.type_name in ("integer", "long") else text


def aws(words: list[str], operation: Operation, refusals: Refusals) -> None:
    service, command, *rest = words
    given = dict(options(rest))
    if (service, command) == ("eks", "update-kubeconfig"):  # the command line's own: it writes a file
        assert set(given) <= {"name", "region", "role-arn", "kubeconfig", "alias"}
        return
    model = operation("s3" if service == "s3api" else service, command)
    members = {xform_name(name, "-"): (name, shape) for name, shape in model.input_shape.members.items()}
    request = {}
    for name, values in given.items():
        if name == "cli-input-json":
            request |= json.loads((ROOT / values[0].removeprefix("file://")).read_text())
        elif name not in GLOBAL_AWS_OPTIONS:
            assert name in members, f"aws {service} {command} has no --{name}"
            member, shape = members[name]
            request[member] = b"" if shape.type_name == "blob" else parameter(shape, values)
    assert refusals(model, request) == []


def kubectl_command(binary: str, words: list[str], build: Build) -> None:
    globals_first = words[:2] if words[0].startswith("--") else []
    rest = words[len(globals_first) :]
    verb = rest[: 2 if rest[0] in ("auth", "rollout") else 1]
    text = "".join(
        subprocess.run([binary, *arguments], capture_output=True, text=True, check=True).stdout
        for arguments in ([*verb, "--help"], ["options"])
    )
    known = set(re.findall(r"--([a-z-]+)[=:]", text)) | set(re.findall(r"(?m)^\s+-(\w),", text))
    for name, _ in options([*globals_first, *rest]):
        assert name in known, f"kubectl {' '.join(verb)} has no option {name}"
    folders = [rest[index + 1] for index, word in enumerate(rest) if word == "-k"] + (
        rest[1:2] if verb == ["kustomize"] else []
    )
    for folder in folders:
        if folder.startswith("manifests/kfp"):
            assert (ROOT / folder / "kustomization.yaml").is_file()  # upstream's part is out of reach: test_manifests
        elif not folder.startswith("https://"):
            assert build(ROOT / folder)


def docker(words: list[str]) -> None:
    if words[:3] == ["buildx", "imagetools", "inspect"]:
        bases = json.loads((ROOT / "images" / "images.lock.json").read_text())["bases"]
        assert words[3] in {base["name"] for base in bases.values()}
        return
    assert words[:2] == ["buildx", "build"]
    given = {name: values[0] for name, values in options(words[2:]) if values}
    dockerfile = (ROOT / given["file"]).read_text()
    assert (ROOT / words[-1]).is_dir()
    assert f"ARG {given['build-arg'].split('=')[0]}" in dockerfile
    assert set(given) | {"push"} <= {"push", "build-arg", "file", "tag"}


def own(words: list[str]) -> None:
    """Our own tools: their parsers say whether the words are right, without doing anything."""
    if words[:3] == ["python", "-m", "pip"]:
        done = subprocess.run(
            [sys.executable, "-m", "pip", words[3], "--help"], capture_output=True, text=True, check=True
        )
        assert all(f"--{name}" in done.stdout for name, _ in options(words[4:]))
        return
    script = words[0] == "python"
    start = [str(ROOT / words[1])] if script else ["-c", "from crosstrain.pipelines.cli import main; main()"]
    rest = [PLACEHOLDERS.get(word, word) for word in words[2 if script else 1 :]]
    subprocess.run([sys.executable, *start, *rest, "--help"], capture_output=True, text=True, check=True)
    if script:
        text = Path(ROOT / words[1]).read_text()
        assert all(f'"--{name}"' in text for name, _ in options(rest))


@pytest.mark.parametrize("line", COMMANDS)
def test_commands(
    line: str,
    kubectl: str,
    build: Build,
    operation: Operation,
    refusals: Refusals,
) -> None:
    program, *words = shlex.split(line)
    if program == "aws":
        aws(words, operation, refusals)
    elif program == "kubectl":
        kubectl_command(kubectl, words, build)
    elif program == "docker":
        docker(words)
    elif program == "grep":
        done = subprocess.run([program, *words], cwd=ROOT, capture_output=True, text=True, check=True)
        assert "manifests/hyperpod/cluster.json" in done.stdout
    else:
        assert program in ("python", "crosstrain"), f"no check for {program}: write one"
        own([program, *words])


def test_there_are_commands_of_every_kind() -> None:
    assert len(COMMANDS) > 35
    assert {line.split()[0] for line in COMMANDS} == {"aws", "kubectl", "docker", "grep", "python", "crosstrain"}


def test_files_and_folders_named_on_the_page_exist() -> None:
    named = set(re.findall(r"`((?:manifests|images|components|pipelines)/[\w./-]+)`", PAGE.read_text()))
    components = {"components/fsx", "components/irsa", "components/kueue", "components/pod-identity"}
    assert components <= named
    for name in named:
        path = ROOT / ("manifests" if name in components else "") / name
        assert path.exists(), name


def test_the_price_example_is_a_price_file(tmp_path: Path) -> None:
    (example,) = blocks("yaml")
    (tmp_path / "own.yaml").write_text(example)
    assert "ml.p5.48xlarge" in load_prices(tmp_path / "own.yaml")

    assert RunOn.decode({"prices": load_prices(tmp_path / "own.yaml")}).prices["ml.p5.48xlarge"].usd_per_hour


def test_the_pipeline_example_compiles_and_hands_its_settings_to_the_job(tmp_path: Path) -> None:
    from kfp.compiler import Compiler

    (example,) = blocks("python")
    made: dict[str, Any] = {}
    exec(example, made)
    Compiler().compile(made["pretrain_only"], str(tmp_path / "made.yaml"))
    pipeline, platform = yaml.safe_load_all((tmp_path / "made.yaml").read_text())
    handed = pipeline["components"]["comp-train-fp8"]["taskConfigPassthroughs"]
    both = {entry["field"]: entry.get("applyToTask", False) for entry in handed}
    assert both == {
        "RESOURCES": False, "KUBERNETES_TOLERATIONS": False, "KUBERNETES_NODE_SELECTOR": False,
        "KUBERNETES_AFFINITY": False, "ENV": True, "KUBERNETES_VOLUMES": True,
    }  # fmt: skip
    settings = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]["exec-train-fp8"]
    assert settings["tolerations"] and settings["pvcMount"]
    assert RunOn.decode(made["P5"]).nodes == 2


@pytest.mark.parametrize("path", sorted(RUNS.glob("*.yaml")), ids=lambda path: path.name)
def test_run_files_fit_the_pipeline_and_the_cluster(path: Path, build: Build) -> None:
    values = parameters.collect(spec.load("pretrain_finetune"), run_file.read(path).parameters, [])
    objects = build(ROOT / "manifests" / "overlays" / "hyperpod")
    names = {kind: {made["metadata"]["name"] for made in objects if made["kind"] == kind} for kind in (
        "LocalQueue", "WorkloadPriorityClass", "ServiceAccount", "PersistentVolumeClaim",
    )}  # fmt: skip
    flavors = {
        made["spec"]["nodeLabels"]["node.kubernetes.io/instance-type"]: made["spec"]
        for made in objects
        if made["kind"] == "ResourceFlavor"
    }
    levels = {level["nodeLabel"] for made in objects if made["kind"] == "Topology" for level in made["spec"]["levels"]}
    jobs = [section["run_on"] for section in values["config"].values() if "run_on" in section]
    assert jobs
    for job in jobs:
        run_on = RunOn.decode(job)
        assert run_on.queue in names["LocalQueue"] and run_on.priority in names["WorkloadPriorityClass"]
        assert run_on.service_account in names["ServiceAccount"]
        assert {volume.claim for volume in run_on.volumes} <= names["PersistentVolumeClaim"]
        assert run_on.topology is None or run_on.topology.level in levels
        tolerated = {entry["key"] for entry in flavors[run_on.instance_type]["tolerations"]}
        assert tolerated <= {toleration.key for toleration in run_on.tolerations}


def test_the_page_says_what_has_not_been_run_before_anything_else() -> None:
    first = PAGE.read_text().split("\n\n")[1]
    assert first.startswith("**What has not been run.**") and "run against AWS or a real cluster" in first


def test_a_wrong_command_would_be_found(
    kubectl: str,
    build: Build,
    operation: Operation,
    refusals: Refusals,
) -> None:
    for words in (
        ["sagemaker", "describe-cluster", "--name", "crosstrain"],
        ["sagemaker", "list-cluster-nodes", "--cluster-name", "crosstrain", "--max-results", "5000"],
        ["sagemaker", "make-cluster"],
        ["eks", "create-addon", "--cluster-name", "cross train", "--addon-name", "x"],
    ):
        with pytest.raises(AssertionError):
            aws(words, operation, refusals)
    for words in (["apply", "--serverside", "-k", "manifests/base"], ["kustomize", "manifests/none"]):
        with pytest.raises(AssertionError):
            kubectl_command(kubectl, words, build)
