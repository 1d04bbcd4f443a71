"""`crosstrain submit` against a server that refuses what KFP's own document does not allow."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from crosstrain.pipelines import kfp_http, spec
from crosstrain.pipelines.kfp_api import Api, version_name

GIVEN = ["--set", "corpus=s3://b/a", "--set", "tuning_corpus=s3://b/t"]


def submit(crosstrain: Any, kfp: Any, *more: object) -> Any:
    return crosstrain("submit", "pretrain_finetune", *GIVEN, "--host", kfp.url, *more)


def test_a_run_is_made_and_its_version_uploaded_once(crosstrain: Any, kfp: Any) -> None:
    first = submit(crosstrain, kfp, "--service-account", "crosstrain-runner", "--pipeline-root", "s3://b/kfp")
    assert first.returncode == 0, first.stderr
    second = submit(crosstrain, kfp, "--set", "train_steps=7", "--experiment", "other", "--name", "again")
    assert second.returncode == 0, second.stderr
    pipeline = spec.load("pretrain_finetune")
    (version,) = kfp.tables["versions"].values()
    assert version["name"] == version_name(pipeline) == f"pretrain-finetune-{pipeline.sha256[:12]}"
    assert version["pipeline_spec"] == pipeline.document
    one, two = kfp.runs
    assert one["runtime_config"] == {
        "parameters": {"corpus": "s3://b/a", "tuning_corpus": "s3://b/t"},
        "pipeline_root": "s3://b/kfp",
    }
    assert one["service_account"] == "crosstrain-runner" and "service_account" not in two
    assert two["runtime_config"]["parameters"]["train_steps"] == 7 and two["display_name"].startswith("again-")
    assert {item["display_name"] for item in kfp.tables["experiments"].values()} == {"pretrain-finetune", "other"}
    assert one["run_id"] in first.stdout and f"{kfp.url}/#/runs/details/{one['run_id']}" in first.stdout


def test_the_run_file_is_taken(crosstrain: Any, kfp: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: mine\nexperiment: e\nparameters: {corpus: s3://b/c, tuning_corpus: s3://b/d, seed: 3}\n")
    done = crosstrain("submit", "pretrain_finetune", "-f", path, "--set", "seed=4", "--host", kfp.url)
    assert done.returncode == 0, done.stderr
    assert kfp.runs[0]["runtime_config"]["parameters"] == {
        "corpus": "s3://b/c",
        "tuning_corpus": "s3://b/d",
        "seed": 4,
    }
    assert kfp.runs[0]["display_name"].startswith("mine-")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schedule: {interval_seconds: 60}", "crosstrain apply"),
        ("pipelineVersion: finetune-0123456789ab", "wants finetune-0123456789ab"),
        ("parameters: {corpus: my/text, tuning_corpus: s3://b/t}", "my/text: a path of this machine"),
        ("parameters: {corpus: s3://b/a}", "not given: tuning_corpus"),
        ("parameters: {corpus: s3://b/a, tuning_corpus: s3://b/t, config: {train_fp8: {stpes: 1}}}", "stpes"),
    ],
)
def test_what_would_fail_there_is_refused_here(
    crosstrain: Any, kfp: Any, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    done = crosstrain("submit", "pretrain_finetune", "-f", "run.yaml", "--host", kfp.url)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1
    assert kfp.requests == []


ANSWERS = [
    (401, 2, "401: no; no valid token"),
    (403, 2, "403: no; this identity may not do that"),
    (404, 2, "404: no; there is no such thing"),
    (400, 2, "400: no; the server finds the request wrong"),
    (409, 75, "409: no; it exists already"),
    (429, 75, "429: no; the server is busy"),
    (500, 75, "500: no; the server failed; try again"),
    (503, 75, "503: no; the server failed; try again"),
    (302, 2, "sent to a login page (302)"),
]


@pytest.mark.parametrize(("status", "code", "message"), ANSWERS)
def test_each_bad_answer_is_one_line_and_a_status(
    crosstrain: Any, kfp: Any, status: int, code: int, message: str
) -> None:
    kfp.faults["POST", "/runs"] = (status, b'{"code": 1, "message": "no"}')
    done = submit(crosstrain, kfp)
    assert done.returncode == code
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: POST {kfp.url}/apis/v2beta1/runs: ") and message in line
    assert kfp.runs == [] and kfp.posts().count("/apis/v2beta1/runs") == 1, "a POST must not be repeated"


def test_no_answer_in_time_is_one_line(crosstrain: Any, kfp: Any) -> None:
    kfp.faults["POST", "/runs"] = (0, b"")
    done = submit(crosstrain, kfp, "--request-timeout", "0.5")
    assert done.returncode == 75
    assert done.stderr == f"error: POST {kfp.url}/apis/v2beta1/runs: no answer in 0.5 s; try again\n"


def test_a_host_that_is_none(crosstrain: Any, kfp: Any) -> None:
    gone = crosstrain("submit", "pretrain_finetune", *GIVEN, "--host", "http://127.0.0.1:9")
    assert gone.returncode == 75 and "is --host right and reachable?" in gone.stderr
    unnamed = crosstrain("submit", "pretrain_finetune", *GIVEN)
    assert unnamed.returncode == 2 and unnamed.stderr.startswith("error: no Kubeflow Pipelines server: give --host")
    tls = crosstrain("submit", "pretrain_finetune", *GIVEN, "--host", kfp.url.replace("http:", "https:"))
    assert tls.returncode in (2, 75) and len(tls.stderr.splitlines()) == 1 and "SSL" in tls.stderr
    kfp.faults["GET", "/healthz"] = (200, b"<html>log in</html>")
    page = submit(crosstrain, kfp)
    assert page.returncode == 2 and "login page?" in page.stderr


@pytest.mark.parametrize("member", ["experiments", "pipelines", "upload_version"])
def test_what_another_submitter_made_in_this_moment_is_used(kfp: Any, member: str) -> None:
    """Two find nothing; one gets 409 and takes the other's."""
    pipeline = spec.load("finetune")
    one, two = (Api(kfp_http.Connection(kfp.url)) for _ in range(2))
    original = two.connection.post if member != "upload_version" else two.connection.upload

    def late(path: str, *rest: Any, **more: Any) -> Any:
        if path.endswith(member):
            one.ensure_version(pipeline) if member != "experiments" else one.experiment("e")
        return original(path, *rest, **more)

    setattr(two.connection, "upload" if member == "upload_version" else "post", late)
    if member == "experiments":
        assert two.experiment("e") == one.experiment("e")
    else:
        assert two.ensure_version(pipeline) == one.ensure_version(pipeline)
    assert all(len(kfp.tables[name]) <= 1 for name in ("experiments", "pipelines", "versions"))


def test_multi_user_names_the_namespace_and_sends_a_token(
    crosstrain: Any, kfp: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kfp.multi_user, kfp.token = True, "first"
    without = submit(crosstrain, kfp)
    assert without.returncode == 2 and "401" in without.stderr and "KF_PIPELINES_SA_TOKEN_PATH" in without.stderr
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "token"))
    unreadable = submit(crosstrain, kfp, "--namespace", "team")
    assert unreadable.returncode == 2 and "cannot read the token" in unreadable.stderr
    (tmp_path / "token").write_text("first\n")
    assert "give --namespace" in submit(crosstrain, kfp).stderr
    done = submit(crosstrain, kfp, "--namespace", "team")
    assert done.returncode == 0, done.stderr
    assert {item["namespace"] for item in kfp.tables["experiments"].values()} == {"team"}
    assert {item["namespace"] for item in kfp.tables["pipelines"].values()} == {"team"}
    monkeypatch.delenv("KF_PIPELINES_SA_TOKEN_PATH")
    for how in (["--existing-token", "first"], ["--token-file", tmp_path / "token"]):
        assert submit(crosstrain, kfp, "--namespace", "team", *how).returncode == 0
    piped = crosstrain(
        "submit", "pretrain_finetune", *GIVEN, "--host", kfp.url, "--namespace", "team", "--existing-token", "-",
        input="first\n",
    )  # fmt: skip
    assert piped.returncode == 0, piped.stderr


def test_a_renewed_token_is_read_again(kfp: Any, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("first")
    kfp.token = "first"
    connection = kfp_http.Connection(kfp.url, token_path=path)
    assert connection.get("/healthz") == {"multi_user": False}
    kfp.token = "second"
    with pytest.raises(kfp_http.ApiError, match="401"):
        connection.get("/healthz")
    path.write_text("second")
    assert connection.get("/healthz") == {"multi_user": False}


def test_in_the_cluster_the_host_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert kfp_http.Connection().host == kfp_http.IN_CLUSTER_HOST
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", "kubeflow.example.com/pipeline/")
    assert kfp_http.Connection().host == "https://kubeflow.example.com/pipeline"


def test_lists_are_read_to_their_last_page(kfp: Any) -> None:
    kfp.page_size = 2
    api = Api(kfp_http.Connection(kfp.url))
    ids = [api.experiment(f"e{i}") for i in range(5)]
    assert len(list(api.connection.pages("/experiments", "experiments"))) == 5
    assert api.experiment("e4") == ids[4]


def test_wait_ends_with_the_runs_status(crosstrain: Any, kfp: Any) -> None:
    def end(state: str) -> None:
        deadline = time.monotonic() + 30
        while not kfp.runs:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        kfp.runs[0]["state"] = "RUNNING"
        time.sleep(0.3)
        kfp.faults["GET", kfp.runs[0]["run_id"]] = (503, b"")
        time.sleep(0.3)
        kfp.faults.clear()
        kfp.runs[0].update(state=state, error={"code": 1, "message": "out of\nmemory"})

    for state, code in (("SUCCEEDED", 0), ("FAILED", 1), ("CANCELED", 1)):
        kfp.tables["runs"].clear()
        player = threading.Thread(target=end, args=(state,))
        player.start()
        done = submit(crosstrain, kfp, "--wait", "--poll", "0.05")
        player.join()
        assert done.returncode == code, done.stderr
        assert "RUNNING" in done.stdout and state in done.stdout
        assert "the run goes on" in done.stderr
        if code:
            assert done.stderr.splitlines()[-1].endswith(f"ended as {state}: out of memory")
    kfp.tables["runs"].clear()
    late = submit(crosstrain, kfp, "--wait", "--poll", "0.05", "--timeout", "0.3")
    assert late.returncode == 75 and "is not over after 0.3 s and goes on" in late.stderr


def test_the_double_refuses_what_the_document_does_not_allow(kfp: Any) -> None:
    connection = kfp_http.Connection(kfp.url)
    for path, body in {
        "/runs": {"display_name": "x", "unknown": 1},
        "/experiments": {"display_name": 1},
        "/nothing": {},
        "/recurringruns": {"mode": "SOMETIMES"},
    }.items():
        with pytest.raises(kfp_http.ApiError, match="400"):
            connection.post(path, body)
    with pytest.raises(kfp_http.ApiError, match="unknown query parameter"):
        connection.get("/runs", color="red")
    assert len(kfp.violations) == 5
    kfp.violations.clear()
    assert json.dumps(kfp.runs) == "[]"


def test_the_names_that_run_files_want_are_printed(crosstrain: Any) -> None:
    printed = crosstrain("compile", "--versions").stdout.splitlines()
    assert printed == [version_name(spec.load(name)) for name in spec.committed()]
    assert crosstrain("compile", "finetune", "--versions").stdout.splitlines() == [printed[0]]
