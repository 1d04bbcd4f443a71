"""A step as a process of its own: cancelled, it deletes its job; killed, it leaves it for the next try."""

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

STEP = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from crosstrain.components.core.launch.job import Job, RunOn
from crosstrain.components.core.launch.launcher import launch
run_on = RunOn(target="pytorchjob", nodes=2, processes_per_node=2, image="i", namespace="team")
print(launch(Job(run="s3://lake/run-1", task="train_fp8", module="m", run_on=run_on)).state)
"""


@pytest.fixture
def step(kubeconfig) -> Iterator:
    """A function that starts the step's process, connected by a kubeconfig."""
    processes = []

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(STEP)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_cancelled_step_deletes_its_job(number, step, play, api):
    one = play()
    process = step()
    one.created()
    one.watched()
    one.run_nodes()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"stopped by {signal.Signals(number).name}; the job was deleted" in errors
    assert one.gone()


def test_a_killed_step_finds_its_job_again(step, play, api):
    one = play()
    first = step()
    made = one.created()
    one.watched()
    one.run_nodes()
    first.kill()
    first.wait()
    assert not one.gone()
    api.requests.clear()
    again = step()
    one.watched()
    api.say(f"{one.name}-worker-0", "[rank0]: crosstrain step=2 total=2 loss=4")
    for index in range(2):
        api.end_log(one.end_node(index, 0, reason="Completed"))
    one.condition("Succeeded")
    out, errors = again.communicate(timeout=30)
    assert again.returncode == 0, errors
    assert out.splitlines() == ["crosstrain step=2 total=2 loss=4", "succeeded"]
    assert "is there already; going on with it" in errors
    assert api.objects[one.plural][one.name]["metadata"]["uid"] == made["metadata"]["uid"]
