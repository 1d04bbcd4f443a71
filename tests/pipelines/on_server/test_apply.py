"""`crosstrain apply` and `status`: a real S3 server, a Kubeflow Pipelines API, submitters that die."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crosstrain.components.core.storage import LocalStore, open_store
from crosstrain.pipelines import spec
from crosstrain.pipelines.kfp_api import version_name
from crosstrain.pipelines.run_file import read

Apply = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with one run file."""
    folder = tmp_path / "runs"
    folder.mkdir()
    write(folder)
    return folder


def write(folder: Path, seed: int = 0, more: str = "", name: str = "one") -> Path:
    version = version_name(spec.load("pretrain_finetune"))
    path = folder / f"{name}.yaml"
    path.write_text(
        f"name: {name}\nexperiment: e\npipelineVersion: {version}\n"
        f"parameters: {{corpus: s3://b/c, tuning_corpus: s3://b/t, seed: {seed}}}\n{more}"
    )
    return path


@pytest.fixture
def arguments(kfp: Any, s3_uri: str, runs: Path) -> list[str]:
    return [str(runs), "--host", kfp.url, "--ledger", f"{s3_uri}/ledger"]


@pytest.fixture
def apply(crosstrain: Any, arguments: list[str]) -> Apply:
    return lambda *more: crosstrain("apply", *arguments, *more)


def receipts(arguments: list[str]) -> list[dict[str, Any]]:
    store = open_store(arguments[-1])
    return [json.loads(store.read(entry.key)) for entry in store.list()]


def test_a_run_is_made_once_and_never_again(
    apply: Apply, kfp: Any, arguments: list[str], runs: Path, crosstrain: Any
) -> None:
    planned = apply("--dry-run")
    assert planned.stdout.startswith("would create   one-") and not kfp.posts() and receipts(arguments) == []
    first = apply("--service-account", "crosstrain-runner")
    assert first.returncode == 0, first.stderr
    (run,) = kfp.runs
    assert run["display_name"] == read(runs / "one.yaml").display_name("") and run["run_id"] in first.stdout
    assert run["service_account"] == "crosstrain-runner"
    (receipt,) = receipts(arguments)
    assert receipt["id"] == run["run_id"] and receipt["done"]
    kfp.requests.clear()
    assert apply().stdout.startswith("recorded") and not kfp.posts()
    assert "pending" in crosstrain("status", *arguments).stdout
    kfp.tables["runs"].clear()  # its history was collected
    assert apply().returncode == 0 and kfp.runs == []
    assert "history collected" in crosstrain("status", *arguments).stdout


def test_an_edited_parameter_makes_exactly_one_more(apply: Apply, kfp: Any, runs: Path) -> None:
    assert apply().returncode == 0
    write(runs, seed=1)
    assert apply().returncode == 0 and apply().returncode == 0
    assert [run["runtime_config"]["parameters"]["seed"] for run in kfp.runs] == [0, 1]
    write(runs, seed=1, more="attempt: 2\n")
    assert apply().returncode == 0 and len(kfp.runs) == 3
    (runs / "one.yaml").rename(runs / "renamed.yaml")
    assert apply().returncode == 0 and len(kfp.runs) == 3


def test_three_submitters_at_once_make_one_run(apply: Apply, kfp: Any, arguments: list[str]) -> None:
    """None is answered before all have asked what runs there are, and a run takes its time to appear."""
    kfp.meetings["GET", "/runs"] = threading.Barrier(3)
    kfp.delays["POST", "/runs"] = 2.0
    done: list[Any] = []
    threads = [threading.Thread(target=lambda: done.append(apply())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kfp.runs) == 1
    assert {one.returncode for one in done} <= {0, 75} and 0 in {one.returncode for one in done}
    assert all("try again" in one.stderr for one in done if one.returncode)
    assert apply().returncode == 0 and len(kfp.runs) == 1 and len(receipts(arguments)) == 1


@pytest.mark.parametrize("made", [False, True])
def test_a_submitter_killed_over_its_claim_is_recovered(
    apply: Apply, kfp: Any, command: list[str], arguments: list[str], tmp_path: Path, made: bool
) -> None:
    """Killed while it asks for the run; `made`: the server has made it, and nobody heard."""
    reached = kfp.reached["POST", "/runs"] = threading.Event()
    process = subprocess.Popen([*command, "apply", *arguments], cwd=tmp_path, env={**os.environ})
    assert reached.wait(30)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kfp.reached.clear()
    (claim,) = receipts(arguments)
    assert claim["id"] == ""
    if made:
        kfp._insert("runs", "run_id", {"display_name": claim["display_name"], "state": "RUNNING"})
    else:
        waiting = apply()
        assert waiting.returncode == 75 and "claimed by another submitter" in waiting.stderr and kfp.runs == []
    recovered = apply("--take-over-after", "0")
    assert recovered.returncode == 0, recovered.stderr
    assert len(kfp.runs) == 1 and receipts(arguments)[0]["id"] == kfp.runs[0]["run_id"]
    assert apply().returncode == 0 and len(kfp.runs) == 1


def test_a_run_that_appears_while_its_claim_is_taken_is_not_made_again(
    kfp: Any, arguments: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former owner's request was still on its way when we looked for its run."""
    from crosstrain.pipelines.cli import main
    from crosstrain.pipelines.ledger import Ledger

    name, claim = read(runs / "one.yaml").display_name(""), Ledger.claim

    def late(ledger: Ledger, *given: Any) -> Any:
        kfp._insert("runs", "run_id", {"display_name": name, "state": "RUNNING"})
        return claim(ledger, *given)

    monkeypatch.setattr(Ledger, "claim", late)
    with pytest.raises(SystemExit) as ended:
        main(["apply", *arguments])
    assert ended.value.code == 0 and len(kfp.runs) == 1
    assert receipts(arguments)[0]["id"] == kfp.runs[0]["run_id"]


def test_a_refused_run_gives_its_claim_up_and_a_lost_answer_does_not(apply: Apply, kfp: Any, runs: Path) -> None:
    kfp.faults["POST", "/runs"] = (403, b'{"message": "no"}')
    assert apply().returncode == 2
    kfp.faults.clear()
    assert apply().returncode == 0 and len(kfp.runs) == 1
    write(runs, seed=1)
    kfp.faults["POST", "/runs"] = (500, b"")
    assert apply().returncode == 75
    kfp.faults.clear()
    assert apply().returncode == 75 and len(kfp.runs) == 1
    assert apply("--take-over-after", "0").returncode == 0 and len(kfp.runs) == 2


def test_one_wrong_file_keeps_no_other_back(
    apply: Apply, kfp: Any, runs: Path, crosstrain: Any, arguments: list[str]
) -> None:
    wrong = write(runs, name="a")
    wrong.write_text(wrong.read_text().replace("seed", "sede"))
    unknown = write(runs, name="b")
    unknown.write_text(unknown.read_text().replace("pipelineVersion: pretrain-", "pipelineVersion: a-"))
    (runs / "c.yaml").write_text("name: c\natempt: 2\n")
    done = apply()
    assert done.returncode == 2 and len(kfp.runs) == 1
    unread, first, second = done.stderr.splitlines()
    assert "c.yaml: unknown key 'atempt'; did you mean 'attempt'?" in unread
    assert "a.yaml: pretrain-finetune: unknown parameter 'sede'; did you mean 'seed'?" in first
    assert "neither on the server nor in this crosstrain" in second
    told = crosstrain("status", *arguments)
    assert told.returncode == 2 and "pending" in told.stdout and told.stderr == f"{unread}\n"


def test_a_changed_schedule_is_swapped(
    apply: Apply, kfp: Any, runs: Path, crosstrain: Any, arguments: list[str]
) -> None:
    write(runs, more="schedule: {cron: '0 0 2 * * *'}\n")
    kfp._insert("recurringruns", "recurring_run_id", {"display_name": "one-0123456789ab", "status": "ENABLED"})
    assert apply().returncode == 0 and kfp.runs == []
    _, first = kfp.schedules
    assert first["status"] == "ENABLED" and first["trigger"] == {"cron_schedule": {"cron": "0 0 2 * * *"}}
    first["status"] = "DISABLED"  # by hand, in the UI
    assert apply().returncode == 0 and first["status"] == "DISABLED"
    first["status"] = "ENABLED"
    write(runs, more="schedule: {interval_seconds: 3600}\n")
    kfp.requests.clear()
    kfp.faults["POST", ":disable"] = (503, b"")
    assert apply().returncode == 75  # it stopped between making the new one and pausing the old one
    kfp.faults.clear()
    assert apply().returncode == 0
    assert [item["status"] for item in kfp.schedules] == ["ENABLED", "DISABLED", "ENABLED"]
    order = [path.rpartition("/")[2].partition(":")[2] or "make" for path in kfp.posts() if "recurring" in path]
    assert order == ["make", "disable", "disable", "enable"]
    assert "schedule enabled" in crosstrain("status", *arguments).stdout


def test_a_store_that_ignores_conditions_is_refused_at_start(
    kfp: Any, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As old S3 clones do: every write is taken."""
    from crosstrain.components.core.s3 import S3Store
    from crosstrain.pipelines.cli import main

    def take(store: Any, key: str, data: bytes, *_: Any) -> bool:
        store.write(key, data)
        return True

    for kind in (S3Store, LocalStore):
        monkeypatch.setattr(kind, "write_if_absent", take)
        monkeypatch.setattr(kind, "write_if_match", take)
    with pytest.raises(SystemExit) as ended:
        main(["apply", *arguments])
    assert ended.value.code == 2 and "ignores conditional writes" in capsys.readouterr().err
    assert kfp.requests == [] and receipts(arguments) == []
