"""A rank of train_fp8 that notes what it reads, and ends as a drill says.

Arguments: a folder for the notes, the drill, then train_fp8's own. A drill is a list of faults, joined by commas; the
n-th start of the ranks (torchrun counts its restarts) suffers the n-th: `step`, rank 1 gets SIGKILL in step 8; `save`,
rank 1 gets SIGKILL while it stores its part of the checkpoint of step 12; `term`, rank 1 gets SIGTERM in step 5.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from crosstrain.components.core.artifact import ArtifactWriter
from crosstrain.components.core.data import BatchPlan
from crosstrain.components.core.step import main

RANK = int(os.environ.get("RANK", "0"))
START = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def note_batches(file: Path, fault: str) -> None:
    """Append every batch that is asked for to a file, and send the signal of the fault at its step."""
    real = BatchPlan.indices

    def indices(self: BatchPlan, step: int) -> Any:
        found = real(self, step)
        with file.open("a") as stream:
            stream.write(json.dumps([START, step, found.tolist()]) + "\n")
        if RANK == 1 and fault == "step" and step == 7:
            wait_for_checkpoint(file.parent, 6)
            os.kill(os.getpid(), signal.SIGKILL)
        if RANK == 1 and fault == "term" and step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    BatchPlan.indices = indices  # type: ignore[method-assign]


def wait_for_checkpoint(folder: Path, step: int) -> None:
    """Return when the checkpoint of a step, which is saved in the background, is whole."""
    deadline = time.monotonic() + 60
    while not list(folder.rglob(f"step-{step:08d}/manifest.json")):
        assert time.monotonic() < deadline, f"no checkpoint of step {step}"
        time.sleep(0.05)


def die_in_save() -> None:
    """End rank 1 when half of its part of the checkpoint of step 12 is stored."""
    real = ArtifactWriter.add

    def add(self: ArtifactWriter, local: Path, path: str) -> Any:
        if RANK == 1 and path.endswith(".distcp") and "step-00000012" in self.store.uri:
            os.truncate(local, local.stat().st_size // 2)
            real(self, local, path)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, local, path)

    ArtifactWriter.add = add  # type: ignore[method-assign]


if __name__ == "__main__":
    faults = sys.argv[2].split(",")
    fault = faults[START] if len(faults) > START else ""
    note_batches(Path(sys.argv[1]) / f"rank-{RANK}.jsonl", fault)
    if fault == "save":
        die_in_save()
    main("train_fp8", sys.argv[3:])
