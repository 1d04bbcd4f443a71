"""Several ranks of one machine as processes, and what they trained."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

RANKS = Path(__file__).with_name("layout_ranks.py")
RUN_SECONDS = 240


@dataclass
class Trained:
    """What one run gave."""

    history: list[dict[str, Any]]
    resumed_from: int
    weights: dict[str, torch.Tensor]
    state: Path
    stalls: list[float] = field(default_factory=list)
    scales: list[dict[str, list[float]]] = field(default_factory=list)
    """Delayed fp8 scales, of each rank."""
    events: list[list[dict[str, Any]]] = field(default_factory=list)
    """Decisions of the guard, of each rank."""

    def values(self, name: str) -> list[float]:
        """One column of the history, where a row has it."""
        return [row[name] for row in self.history if name in row]


Specs = dict[str, dict[str, Any]]
Start = Callable[[int, Specs], dict[str, Trained]]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start_ranks(world: int, folder: Path, specs: Specs) -> dict[str, Trained]:
    """Do the runs one after another on `world` ranks; raises with the output of the first rank that fails."""
    folder.mkdir(parents=True)
    runs = {
        name: {"tied": True, "state": str(folder / f"{name}.state"), **spec, "result": str(folder / name)}
        for name, spec in specs.items()
    }
    if world == 1:
        found = importlib.util.spec_from_file_location("layout_ranks", RANKS)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        for spec in runs.values():
            module.run(module.World(), spec)
    else:
        _start_processes(world, folder, list(runs.values()))
    results = {}
    for name, spec in runs.items():
        values = json.loads(Path(spec["result"]).read_text())
        weights = load_file(spec["result"] + ".safetensors")
        results[name] = Trained(**values, weights=weights, state=Path(spec["state"]))
    return results


def _start_processes(world: int, folder: Path, runs: list[dict[str, Any]]) -> None:
    (folder / "runs.json").write_text(json.dumps(runs))
    common = {
        **os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    ranks = []
    for rank in range(world):
        with (folder / f"rank-{rank}.log").open("w") as output:
            command = [sys.executable, str(RANKS), str(folder / "runs.json")]
            env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT))
    try:
        codes = [rank.wait(timeout=RUN_SECONDS) for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if any(codes):
        logs = [f"--- rank {rank}: {code}\n{(folder / f'rank-{rank}.log').read_text()[-3000:]}"
                for rank, code in enumerate(codes) if code]  # fmt: skip
        raise AssertionError("\n".join(logs))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """A function of a number of ranks and named runs that gives what each trained."""
    count = [0]

    def run(world: int, specs: Specs) -> dict[str, Trained]:
        count[0] += 1
        return start_ranks(world, tmp_path_factory.mktemp("ranks") / str(count[0]), specs)

    return run
