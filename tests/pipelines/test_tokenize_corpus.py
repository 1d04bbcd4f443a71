"""The committed tokenize_corpus, small, through KFP's own runner: one step's tokens, also after a kill."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from crosstrain.components.core.step import execute, load_config

pytestmark = pytest.mark.slow

LINES = "".join(json.dumps({"text": f"document {i} of {i * i} words"}) + "\n" for i in range(300))
OPTIONS = {"unit_bytes": 1024}
KILLED = "for-loop-1-iteration-1/tokenize-partition"


def steps(folder: Path) -> dict[str, dict[str, Any]]:
    return {step["task"]: step for step in json.loads((folder / "summary.json").read_text())["steps"]}


def kill(run: "subprocess.Popen[str]", events: Path, task: str) -> None:
    """Kill a step as soon as it has begun."""
    while run.poll() is None:
        lines = events.read_text().splitlines() if events.exists() else []
        if any(line.endswith("}") and json.loads(line)["task"] == task for line in lines):
            for process in psutil.Process(run.pid).children(recursive=True):
                command = process.as_dict(["cmdline"], ad_value=[])["cmdline"]  # another child may have just ended
                if task in " ".join(command) and command[0] == sys.executable:
                    process.kill()
                    return
        time.sleep(0.02)
    raise AssertionError(f"the run ended before: {run.communicate()}")


def test_a_killed_partition_alone_is_done_again_and_the_tokens_are_those_of_one_step(
    crosstrain, command: list[str], tmp_path: Path
) -> None:
    (tmp_path / "corpus.jsonl").write_text(LINES)
    settings = {
        "corpus": tmp_path / "corpus.jsonl",
        "vocab_size": 300,
        "partitions": 3,
        "sequence_length": 32,
        "config": json.dumps({"tokenize_plan": OPTIONS}),
    }
    arguments = ["run", "tokenize_corpus", "--out", str(tmp_path / "out")]
    arguments += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        kill(run, tmp_path / "out" / "events.jsonl", KILLED)
        _, errors = run.communicate(timeout=120)
    assert run.returncode == 1
    assert f"Tokenize partition, 1 ({KILLED}) failed: killed by signal 9" in errors
    before = steps(tmp_path / "out")
    assert before["tokenize-join"]["status"] == before["shard"]["status"] == "skipped"

    done = crosstrain(*arguments)
    assert done.returncode == 0, done.stderr
    found = steps(tmp_path / "out")
    partitions = [found[f"for-loop-1-iteration-{number}/tokenize-partition"] for number in range(3)]
    assert [one["status"] for one in partitions] == ["reused", "done", "reused"]
    assert "Tokenize partition, 1: done in" in done.stdout

    raw = found["import-data"]["uri"]
    values = {"corpus": raw, "vocab_size": 300, "workers": 1, "output": str(tmp_path / "whole"), **OPTIONS}
    whole = execute("tokenize", load_config("tokenize").decode(values)).artifact
    assert found["tokenize-join"]["manifest_sha256"] == whole.manifest.sha256
    values = {"tokens": whole.uri, "sequence_length": 32, "output": str(tmp_path / "shards")}
    shards = execute("shard", load_config("shard").decode(values)).artifact
    assert found["shard"]["manifest_sha256"] == shards.manifest.sha256
