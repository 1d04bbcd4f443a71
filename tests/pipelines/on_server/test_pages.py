"""docs/kfp-ui.md and docs/gitops.md, command by command, against a server that holds each request to KFP's document."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from crosstrain.pipelines import spec
from crosstrain.pipelines.kfp_api import version_name

ROOT = Path(__file__).resolve().parents[3]
HOSTS = ("https://kubeflow.example.com/pipeline", "http://localhost:8888")
Call = Callable[[str], Any]


def page(name: str) -> tuple[str, list[str]]:
    """The YAML of a page, and its `crosstrain` commands."""
    text = (ROOT / "docs" / name).read_text()
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    shell = "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    return example, [line for line in shell.splitlines() if line.startswith("crosstrain ")]


@pytest.fixture
def call(crosstrain: Any, kfp: Any, monkeypatch: pytest.MonkeyPatch, s3_uri: str) -> Call:
    """Run a command as it stands on the page, with this server and store in place of the page's."""
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", kfp.url)

    def run(line: str, **options: Any) -> Any:
        for host in HOSTS:
            line = line.replace(host, kfp.url)
        return crosstrain(*shlex.split(line.replace("s3://lake/ledger", f"{s3_uri}/ledger"))[1:], **options)

    return run


def test_submitting_as_the_page_says(call: Call, kfp: Any, tmp_path: Path) -> None:
    example, lines = page("kfp-ui.md")
    (tmp_path / "run.yaml").write_text(example)
    (tmp_path / "token").write_text("secret\n")
    plain = [line for line in lines if line.startswith("crosstrain submit") and "--namespace" not in line]
    assert len(plain) == 3
    for line in plain:
        done = call(line.replace(" --wait", ""))
        assert done.returncode == 0, done.stderr
    assert [run["display_name"].rsplit("-", 2)[0] for run in kfp.runs] == ["support-model", "longer", "support-model"]
    assert kfp.runs[0]["service_account"] == "crosstrain-runner"
    assert kfp.runs[1]["runtime_config"]["parameters"]["train_steps"] == 4000
    assert len(kfp.tables["versions"]) == 1, "uploaded once"
    kfp.multi_user, kfp.token = True, "secret"
    with_token = [line for line in lines if "--namespace team" in line]
    assert len(with_token) == 2
    for line in with_token:
        done = call(line, input="secret\n")
        assert done.returncode == 0, done.stderr


def test_applying_as_the_page_says(call: Call, kfp: Any, tmp_path: Path) -> None:
    example, lines = page("gitops.md")
    (tmp_path / "runs").mkdir()
    written = tmp_path / "runs" / "support.yaml"
    written.write_text(example)
    versions, plan, apply, status, objects = lines
    printed = call(versions).stdout.split()
    assert version_name(spec.load("finetune")) in printed
    refused = call(apply)
    assert refused.returncode == 2 and "neither on the server nor in this crosstrain" in refused.stderr
    (version,) = [name for name in printed if name.startswith("finetune-")]
    written.write_text(example.replace("finetune-0123456789ab", version))
    assert call(plan).stdout.startswith("would create") and kfp.runs == []
    for verb in ("created", "recorded"):
        done = call(apply)
        assert done.returncode == 0 and done.stdout.startswith(verb), done.stderr
    assert len(kfp.runs) == 1 and "pending" in call(status).stdout
    assert call(objects).returncode == 2, "images are not published yet"
    made = list(yaml.safe_load_all(call(f"{objects} --allow-tags").stdout))
    assert [one["kind"] for one in made] == ["Pipeline", "PipelineVersion"] and made[1]["metadata"]["name"] == version


def test_a_schedule_as_the_page_says(call: Call, kfp: Any, tmp_path: Path) -> None:
    example, (_, _, apply, *_) = page("gitops.md")
    text = (ROOT / "docs" / "gitops.md").read_text()
    schedules = re.findall(r"`?(?:schedule: )?(\{(?:cron|interval_seconds)[^}]*\})`", text)
    assert len(schedules) == 2
    (tmp_path / "runs").mkdir()
    example = example.replace("finetune-0123456789ab", version_name(spec.load("finetune")))
    for schedule in schedules:
        (tmp_path / "runs" / "support.yaml").write_text(f"{example}schedule: {schedule}\n")
        done = call(apply)
        assert done.returncode == 0, done.stderr
    assert [one["status"] for one in kfp.schedules] == ["DISABLED", "ENABLED"] and kfp.runs == []
