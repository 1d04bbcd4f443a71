"""Jobs on this machine: real torchrun, two gloo ranks; who failed, what it said, and that nobody is left."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from crosstrain.components.core.launch.job import Job, JobFailed, RunOn
from crosstrain.components.core.launch.local import run_local
from crosstrain.components.core.launch.render import render

PROGRAM = """
import os, sys, time
import torch
import torch.distributed as dist
how, note = sys.argv[1], sys.argv[2]
dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.tensor([rank + 1]); dist.all_reduce(total)
print(f"rank {rank} of {dist.get_world_size()} sum {int(total)} {note}", flush=True)
open(os.path.join(note, f"pid{rank}"), "w").write(str(os.getpid()))
if how == "fail" and rank == 1:
    print("the shard is damaged", flush=True)
    os._exit(7)  # sys.exit would race with gloo's threads, which may abort the process first
if how == "kill" and rank == 1:
    os.kill(os.getpid(), 9)
if how in ("fail", "kill", "hang"):
    dist.barrier() if how != "hang" else time.sleep(600)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # an interpreter that ends while gloo's threads do may be aborted by them
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A module `tiny_ranks` on the path of children."""
    (tmp_path / "tiny_ranks.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def job(how: str, folder: Path, **settings: object) -> Job:
    run_on = RunOn.decode({"processes_per_node": 2, **settings})
    return Job(run=str(folder), task="tiny", module="tiny_ranks", arguments=(how, str(folder)), run_on=run_on)


def alive(folder: Path) -> list[int]:
    pids = [int(path.read_text()) for path in folder.glob("pid*")]
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def wait_for_ranks(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while len([path for path in folder.glob("pid*") if path.read_text()]) < 2:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.1)


def test_two_ranks_meet_and_rank_0_is_heard(program, capsys):
    result = run_local(job("end", program))
    out = capsys.readouterr().out
    assert f"rank 0 of 2 sum 3 {program}" in out.splitlines()
    assert "rank 1 of 2" not in out
    assert result.state == "succeeded" and result.exits[0].code == 0 and result.restarts == 0
    assert result.seconds_running > 0 and result.seconds_queued == 0


@pytest.mark.parametrize(("how", "code", "says"), [("fail", 7, "the shard is damaged"), ("kill", -9, "rank 1 of 2")])
def test_the_first_failing_rank_and_its_last_lines_are_in_the_error(how, code, says, program):
    with pytest.raises(JobFailed, match="rank 1 ended with exit status") as caught:
        run_local(job(how, program))
    result = caught.value.result
    assert (result.exits[0].rank, result.exits[0].rank_code) == (1, code)
    assert says in result.tail[-1] and says in str(caught.value)
    assert not [line for line in result.tail if "rank 0 of 2" in line]
    assert not alive(program)


def test_a_job_past_its_time_is_ended_whole(program):
    with pytest.raises(JobFailed, match=r"not done after 8 s \(timeouts\.run\)"):
        run_local(job("hang", program, timeouts={"run": 8, "grace": 5}))
    assert not alive(program)


def test_ranks_do_not_outlive_a_torchrun_that_was_killed(program):
    def kill_torchrun() -> None:
        wait_for_ranks(program)
        for child in psutil.Process().children():
            if "torch.distributed.run" in child.cmdline():
                child.kill()

    killer = threading.Thread(target=kill_torchrun)
    killer.start()
    with pytest.raises(JobFailed, match="torchrun ended with -9"):
        run_local(job("hang", program))
    killer.join()
    deadline = time.monotonic() + 5
    while alive(program) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = alive(program)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_stopped_step_leaves_no_rank_behind(number, program):
    code = textwrap.dedent(f"""
        from crosstrain.components.core.launch.job import Job, RunOn
        from crosstrain.components.core.launch.local import run_local
        run_local(Job(run="r", task="tiny", module="tiny_ranks", arguments=("hang", {str(program)!r}),
                      run_on=RunOn(processes_per_node=2)))
    """)
    step = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        wait_for_ranks(program)
        step.send_signal(number)
        _, errors = step.communicate(timeout=60)
        if number != signal.SIGKILL:
            assert f"stopped by {signal.Signals(number).name}" in errors
        deadline = time.monotonic() + 40
        while alive(program) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not alive(program)
    finally:
        step.kill()
        for pid in alive(program):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_trainjobs_own_command_line_brings_two_nodes_together(program):
    """The shell line and arguments of a rendered TrainJob, once for each node, with Trainer's variables."""
    job_ = Job(
        run="r",
        task="tiny",
        module="tiny_ranks",
        image="i",
        arguments=("end", str(program)),
        run_on=RunOn(target="trainjob", nodes=2, processes_per_node=1, retries=0),
    )
    trainer = render(job_)["spec"]["trainer"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    nodes = []
    try:
        for rank in (1, 0):
            pet = {"PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
            arguments = [one.replace("/tmp/torchrun", str(program / f"node{rank}")) for one in trainer["args"]]
            nodes.append(
                subprocess.Popen(
                    [*trainer["command"], *arguments],
                    env={**os.environ, **pet, "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PATH": path},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        outputs = [node.communicate(timeout=90)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert sum(f"of 2 sum 3 {program}" in output for output in outputs) == 2
