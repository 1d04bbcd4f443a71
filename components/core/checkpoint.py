"""Checkpoints of a training run: saved whole or not at all, found again by the run that they belong to.

They lie under `<state>/<run key>/step-00000100/` as artifacts of kind checkpoint. The manifest is written
last, so that a save which was killed is no checkpoint: it is never chosen and is cleared away by the next
run. The run key is a hash of what decides the trajectory (`run_key`), so that a run with other options or
data cannot pick up a foreign state. Loading is by torch's safe unpickler. Left out on purpose: what the state
means, which is the loop's, and sharded or asynchronous saving.
"""

import hashlib
import json
import logging
import pickle
import shutil
from collections.abc import Mapping
from typing import Any

import torch

from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.manifest import MANIFEST_NAME, CheckpointFacts, Source
from crosstrain.components.core.storage import TEMPORARY, open_store

log = logging.getLogger(__name__)

STATE_NAME = "state.pt"


def run_key(component: str, options: Mapping[str, Any], inputs: Mapping[str, Source]) -> str:
    """The name of a run: SHA-256 over component, options that decide the trajectory, and input manifests."""
    identity = {
        "component": component,
        "options": dict(options),
        "inputs": {name: source.sha256 for name, source in inputs.items()},
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True, allow_nan=False).encode()).hexdigest()


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(
        self,
        state_uri: str,
        key: str,
        component: str,
        options: Mapping[str, Any],
        inputs: Mapping[str, Source],
        keep: int,
    ) -> None:
        """Checkpoints under `state_uri`.

        Args:
            state_uri: Prefix that may hold the checkpoints of many runs.
            key: This run's name; see `run_key`.
            component: Recorded in manifests.
            options: Recorded in manifests.
            inputs: Recorded in manifests.
            keep: Checkpoints kept; the oldest beyond are deleted after each save.
        """
        open_store(state_uri).check_writable()
        self.uri = f"{open_store(state_uri).uri}/{key}"
        self._store = open_store(self.uri)
        self._key, self._component, self._options, self._inputs = key, component, dict(options), dict(inputs)
        self._keep = keep

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return sorted(
            int(folder.removeprefix("step-"))
            for folder, _, name in (entry.key.partition("/") for entry in self._store.list())
            if name == MANIFEST_NAME
        )

    def save(self, step: int, state: Mapping[str, Any], train_loss: float | None) -> Artifact:
        """Store a checkpoint after `step` optimizer steps, then delete the oldest beyond those kept.

        Args:
            step: Optimizer steps done.
            state: Nested dicts, lists, numbers, strings and tensors.
            train_loss: Last loss, nats a token, for the manifest.
        """
        with ArtifactWriter(f"{self.uri}/{_folder(step)}") as writer:
            with writer.create(STATE_NAME) as path:
                torch.save(dict(state), path)
            facts = CheckpointFacts(step=step, run_key=self._key, train_loss=train_loss)
            artifact = writer.commit(self._component, facts, self._options, self._inputs)
        for old in self.steps()[: -self._keep]:
            self.delete(old)
        return artifact

    def load(self, step: int) -> dict[str, Any]:
        """The state saved after `step` steps, verified against its manifest; tensors on the CPU.

        Raises:
            ValueError: damaged, of another run, or not loadable.
        """
        artifact = Artifact.open(f"{self.uri}/{_folder(step)}", "checkpoint")
        if artifact.facts.run_key != self._key or artifact.facts.step != step:
            raise ValueError(f"{artifact.uri}: the checkpoint of another run lies here; choose another state prefix")
        path = artifact.fetch(STATE_NAME)
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{artifact.uri}: the checkpoint does not load ({reason}); delete it to go on without"
            ) from None
        return state

    def clear_torn(self) -> None:
        """Delete what saves that were cut short left behind."""
        complete = {_folder(step) for step in self.steps()}
        for folder in sorted({entry.key.partition("/")[0] for entry in self._store.list()} - complete):
            log.warning("%s/%s: a save was cut short here; clearing it away", self.uri, folder)
            self._store.delete_prefix(folder)
        if (local := self._store.local_path()) is not None:
            for path in local.glob(f"*/{TEMPORARY}*"):
                log.warning("%s: left by a save that was cut short; clearing it away", path)
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def delete(self, step: int) -> None:
        """Delete one checkpoint; it stops existing before its objects go."""
        self._store.delete(f"{_folder(step)}/{MANIFEST_NAME}")
        self._store.delete_prefix(_folder(step))


def _folder(step: int) -> str:
    return f"step-{step:08d}"
