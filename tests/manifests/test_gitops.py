"""GitOps manifests build, are valid, submit what lies beside them, and give the submitter no more than it needs."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from crosstrain.pipelines import cli, kfp_api, run_file, spec

ROOT = Path(__file__).resolve().parents[2]
GITOPS = ROOT / "manifests" / "gitops"
EXAMPLE = Path("runs") / "kubeflow"
Object = dict[str, Any]
Build = Callable[[Path], list[Object]]
Validate = Callable[[Object], None]


def find(objects: list[Object], kind: str, name: str = "") -> Object:
    (found,) = [made for made in objects if made["kind"] == kind and made["metadata"]["name"].startswith(name)]
    return found


@pytest.fixture
def build_with(build: Build, tmp_path: Path) -> Callable[..., list[Object]]:
    """The objects of the example with these adapters, and its run file changed by a replacement."""

    def built(*adapters: str, edit: tuple[str, str] = ("", "")) -> list[Object]:
        folder = tmp_path / "gitops"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(GITOPS, folder)
        path = folder / EXAMPLE / "kustomization.yaml"
        content = yaml.safe_load(path.read_text())
        content["components"] = [f"../../components/{name}" for name in adapters]
        path.write_text(yaml.safe_dump(content))
        runs = folder / EXAMPLE / "support.yaml"
        runs.write_text(runs.read_text().replace(*edit) if edit[0] else runs.read_text())
        return build(folder / EXAMPLE)

    return built


def test_the_example_is_valid(build: Build, validate: Validate) -> None:
    objects = build(GITOPS / EXAMPLE)
    for made in objects:
        validate(made)
        assert made["metadata"]["namespace"] == "kubeflow"
    assert sorted(made["kind"] for made in objects) == ["ConfigMap", "ConfigMap", "Job", "ServiceAccount"]


@pytest.mark.parametrize(
    "adapters",
    [
        (),
        ("argocd",),
        ("flux",),
        ("argocd", "multi-user"),
        ("flux", "multi-user"),
        ("flux", "multi-user", "store-keys"),
    ],
)
def test_every_adapter_builds_and_is_valid(
    build_with: Callable[..., list[Object]], validate: Validate, adapters: tuple[str, ...]
) -> None:
    objects = build_with(*adapters)
    for made in objects:
        validate(made)
    annotations = find(objects, "Job")["metadata"].get("annotations", {})
    assert (annotations.get("argocd.argoproj.io/hook") == "PostSync") == ("argocd" in adapters)
    assert (annotations.get("argocd.argoproj.io/hook-delete-policy") == "BeforeHookCreation") == ("argocd" in adapters)
    assert (annotations.get("kustomize.toolkit.fluxcd.io/force") == "enabled") == ("flux" in adapters)
    assert "ttlSecondsAfterFinished" not in find(objects, "Job")["spec"]


def test_an_edited_run_file_changes_the_job(build_with: Callable[..., list[Object]]) -> None:
    def volume(objects: list[Object]) -> str:
        (runs,) = [one for one in find(objects, "Job")["spec"]["template"]["spec"]["volumes"] if one["name"] == "runs"]
        assert runs["configMap"]["name"] == find(objects, "ConfigMap", "crosstrain-runs")["metadata"]["name"]
        return str(runs["configMap"]["name"])

    assert volume(build_with("flux")) != volume(build_with("flux", edit=("steps: 500", "steps: 600")))


def test_the_pod_is_restricted_and_has_no_token_of_kubernetes(build_with: Callable[..., list[Object]]) -> None:
    objects = build_with("argocd")
    pod = find(objects, "Job")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    assert find(objects, "ServiceAccount")["automountServiceAccountToken"] is False
    assert pod["restartPolicy"] == "Never"  # what a podFailurePolicy demands
    assert not [made for made in objects if made["kind"] in ("Role", "ClusterRole", "RoleBinding")]


def test_multi_user_gives_a_token_for_kfp_alone_and_kfps_verbs(build_with: Callable[..., list[Object]]) -> None:
    objects = build_with("argocd", "multi-user")
    pod = find(objects, "Job")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (token,) = [one["projected"]["sources"][0]["serviceAccountToken"] for one in pod["volumes"] if "projected" in one]
    assert token["audience"] == "pipelines.kubeflow.org"
    variable = {one["name"]: one["value"] for one in container["env"]}["KF_PIPELINES_SA_TOKEN_PATH"]
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert variable == f"{mounts['kfp-token']}/{token['path']}"
    assert {"runs", "tmp"} <= set(mounts)
    role = find(objects, "Role")
    assert {group for rule in role["rules"] for group in rule["apiGroups"]} == {"pipelines.kubeflow.org"}
    verbs = {verb for rule in role["rules"] for verb in rule["verbs"]}
    assert verbs == {"create", "get", "list", "enable", "disable"}
    (subject,) = find(objects, "RoleBinding")["subjects"]
    assert subject["name"] == pod["serviceAccountName"]


def test_keys_come_from_a_secret_that_is_not_in_git(build_with: Callable[..., list[Object]]) -> None:
    objects = build_with("argocd", "store-keys", "multi-user")
    (container,) = find(objects, "Job")["spec"]["template"]["spec"]["containers"]
    secrets = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in container["env"] if "valueFrom" in one}
    assert set(secrets) == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    assert "KF_PIPELINES_SA_TOKEN_PATH" in {one["name"] for one in container["env"]}, "one adapter undoes another"
    assert not [made for made in objects if made["kind"] == "Secret"]
    launcher = (ROOT / "manifests" / "components" / "seaweedfs" / "launcher.yaml").read_text()
    for secret in secrets.values():
        assert f"secretName: {secret['name']}" in launcher and f"Key: {secret['key']}\n" in launcher


def test_the_submitters_role_reaches_the_ledger_alone(build: Build) -> None:
    policy = json.loads((GITOPS / "ledger-policy.json").read_text())
    ledger = find(build(GITOPS / EXAMPLE), "ConfigMap", "crosstrain-submitter")["data"]["LEDGER"]
    arn = "arn:aws:s3:::" + ledger.removeprefix("s3://")
    objects, bucket = policy["Statement"]
    assert objects["Resource"] == f"{arn}/*" and bucket["Resource"] == arn.rpartition("/")[0]
    assert set(objects["Action"]) == {"s3:GetObject", "s3:PutObject", "s3:DeleteObject"}  # the probe tidies up
    assert bucket["Action"] == "s3:ListBucket"


def test_the_jobs_command_is_one_that_crosstrain_takes(build: Build) -> None:
    objects = build(GITOPS / EXAMPLE)
    (container,) = find(objects, "Job")["spec"]["template"]["spec"]["containers"]
    settings = find(objects, "ConfigMap", "crosstrain-submitter")["data"]
    words = [word.replace("$(LEDGER)", settings["LEDGER"]) for word in container["args"]]
    arguments = cli._parser().parse_args(words)
    assert (arguments.module, str(arguments.folder)) == ("crosstrain.pipelines.apply", "/runs")
    assert arguments.ledger == settings["LEDGER"], shlex.join(words)
    assert str(arguments.folder) == container["volumeMounts"][0]["mountPath"]
    dockerfile = (ROOT / "images" / "submit" / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["crosstrain"]' in dockerfile
    assert "USER 65532:65532" in dockerfile


def test_the_run_file_is_read_out_of_the_config_map(build: Build, tmp_path: Path) -> None:
    data = find(build(GITOPS / EXAMPLE), "ConfigMap", "crosstrain-runs")["data"]
    version = tmp_path / "..2026_01_01"  # as a volume of a ConfigMap lies there
    version.mkdir()
    (tmp_path / "..data").symlink_to(version)
    for name, text in data.items():
        (version / name).write_text(text)
        (tmp_path / name).symlink_to(Path("..data") / name)
    files, refused = run_file.read_folder(tmp_path)
    ((path, file),) = files.items()
    assert refused == []
    assert (path.name, file.name) == ("support.yaml", "support")
    assert file.pipeline_name == "finetune"
    assert run_file.read_folder(GITOPS / EXAMPLE)[0].keys() == {GITOPS / EXAMPLE / "support.yaml"}


def test_the_run_fits_the_pipeline_it_names() -> None:
    from crosstrain.pipelines import parameters

    file = run_file.read(GITOPS / EXAMPLE / "support.yaml")
    pipeline = spec.load(file.pipeline_name)
    parameters.fill(pipeline, parameters.collect(pipeline, file.parameters, []))
    assert file.pipelineVersion != kfp_api.version_name(pipeline)  # nobody submits an example as it is


@pytest.mark.parametrize("name", ["argocd", "flux"])
def test_the_tools_own_objects_are_valid_and_name_the_folder(name: str, validate: Validate) -> None:
    objects = list(yaml.safe_load_all((GITOPS / "clusters" / f"{name}.yaml").read_text()))
    for made in objects:
        validate(made)
    if name == "argocd":
        (made,) = objects
        application = made["spec"]["template"]["spec"]
        assert "ServerSideApply=true" in application["syncPolicy"]["syncOptions"]
        assert application["syncPolicy"]["retry"]["limit"] > 0
        (generator,) = made["spec"]["generators"]
        assert Path(generator["git"]["directories"][0]["path"]).match("runs/*")
        assert (GITOPS / EXAMPLE).is_dir()
    else:
        assert find(objects, "Kustomization")["spec"]["path"] == "./runs/kubeflow"
        assert (
            find(objects, "Kustomization")["spec"]["sourceRef"]["name"]
            == find(objects, "GitRepository")["metadata"]["name"]
        )
