"""A corpus tokenized in partitions, by processes that share nothing but the output: the same bytes as by one step."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.step import execute, load_config
from crosstrain.components.core.storage import open_store
from crosstrain.components.tokenize.program import run_partition

LINES = "".join(
    json.dumps({"text": f"document {i} of words, and more of them " * (i % 7 + 1)}) + "\n" for i in range(90)
)
MODULE = "crosstrain.components.tokenize"


@pytest.fixture
def values(take, plain_tokenizer):
    return {"corpus": take({"a.jsonl": LINES}), "tokenizer_uri": str(plain_tokenizer), "unit_bytes": 1024, "workers": 1}


@pytest.fixture
def config(values):
    return lambda output, **more: load_config("tokenize").decode({**values, "output": output, **more})


@pytest.mark.parametrize("partitions", [1, 3, 40])
def test_partitions_and_a_join_give_the_bytes_of_one_step(config, tmp_path, store_uri, partitions):
    whole = execute("tokenize", config(str(tmp_path / "whole"))).artifact
    done = [run_partition(config(store_uri), number, partitions) for number in reversed(range(partitions))]
    assert sum(one.units for one in done) == len(whole.facts.parts) > 3
    with pytest.raises(FileNotFoundError):
        Artifact.open(store_uri)
    before = {entry.key: entry.etag for entry in open_store(store_uri).list() if entry.key.startswith("part-")}
    joined = execute("tokenize", config(store_uri)).artifact
    assert joined.manifest.encode() == whole.manifest.encode()
    store = open_store(store_uri)
    assert {key: store.stat(key).etag for key in before} == before, "the join made parts again"
    assert not list(store.list("units"))


def test_partitions_run_at_once_in_processes_and_a_lost_one_is_made_up_for(values, config, tmp_path, s3_uri):
    options = [f"--{name.replace('_', '-')}={value}" for name, value in {**values, "output": s3_uri}.items()]

    def start(number):
        command = [sys.executable, "-m", f"{MODULE}.partition", f"{number}/3", *options]
        return subprocess.run(command, capture_output=True, text=True)

    with ThreadPoolExecutor(2) as pool:
        assert [done.returncode for done in pool.map(start, (0, 2))] == [0, 0]
    whole = execute("tokenize", config(str(tmp_path / "whole"), deduplicate=False)).artifact
    assert execute("tokenize", config(s3_uri)).artifact.manifest.encode() == whole.manifest.encode()


def test_a_partition_of_other_work_is_refused_and_destroys_nothing(config, tmp_path):
    output = str(tmp_path / "out")
    run_partition(config(output), 0, 2)
    before = sorted(entry.key for entry in open_store(output).list())
    with pytest.raises(ValueError, match="other options or inputs"):
        run_partition(config(output, append_eos=False), 1, 2)
    assert sorted(entry.key for entry in open_store(output).list()) == before


def test_a_partition_that_does_not_exist_is_refused(config, tmp_path):
    with pytest.raises(ValueError, match="from 0 to 1"):
        run_partition(config(str(tmp_path / "out")), 2, 2)
    done = subprocess.run([sys.executable, "-m", f"{MODULE}.partition", "x"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "give one as 0/4" in done.stderr
