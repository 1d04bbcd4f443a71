"""`crosstrain apply`: make what a folder of run files declares exist in Kubeflow Pipelines, each once.

Safe to repeat and to run from several places at once. For each file: a run of its name is there, or the ledger has
a receipt: done. Otherwise claim the key in the ledger, make sure the pipeline version is there, start the run and
write the receipt. A file's error does not keep the others back. Deleting a file stops nothing.
"""

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from crosstrain.pipelines import parameters, run_file, spec
from crosstrain.pipelines.connect import open_api
from crosstrain.pipelines.kfp_api import Api, Object, Version, Work, version_name
from crosstrain.pipelines.kfp_http import TRY_AGAIN, ApiError
from crosstrain.pipelines.ledger import Found, Ledger
from crosstrain.pipelines.run_file import RunFile

_DESCRIPTION = "crosstrain run file"
"""What the description of everything made here begins with."""


def main(arguments: argparse.Namespace) -> int:
    """Apply a folder; 0: all is as declared, 2: a file was refused, 75: try again."""
    files, refused = run_file.read_folder(arguments.folder)
    known = _known_pipelines(arguments.pipeline)
    ledger = Ledger(arguments.ledger, arguments.take_over_after)
    if not arguments.dry_run:
        ledger.check()
    submitter = Submitter(open_api(arguments), ledger, known, arguments)
    for line in refused:
        print(f"error: {line}", file=sys.stderr, flush=True)
    status = 2 if refused else 0
    for path, file in files.items():
        try:
            outcome = submitter.plan(file) if arguments.dry_run else submitter.apply(file)
            print(outcome, flush=True)
        except (ValueError, OSError) as error:
            print(f"error: {path}: {error}", file=sys.stderr, flush=True)
            status = max(status, 1 if getattr(error, "exit_status", 2) == TRY_AGAIN else 2)
    return TRY_AGAIN if status == 1 else status


class TryLater(OSError):
    """Another submitter is at work on this file."""

    exit_status = TRY_AGAIN


@dataclass(frozen=True)
class Outcome:
    """What became of a file."""

    verb: str
    display_name: str
    id: str = ""

    def __str__(self) -> str:
        return f"{self.verb:<14} {self.display_name}  {self.id}".rstrip()


class Submitter:
    """Applies run files through one API and one ledger."""

    def __init__(
        self, api: Api, ledger: Ledger, known: dict[str, spec.Pipeline], arguments: argparse.Namespace
    ) -> None:
        self._api = api
        self._ledger = ledger
        self._known = known
        self._service_account = arguments.service_account
        self._pipeline_root = arguments.pipeline_root

    def plan(self, file: RunFile) -> Outcome:
        """What `apply` would do; reads only.

        Raises:
            ValueError, ApiError: as `apply`.
        """
        key, name = file.key(self._api.identity), file.display_name(self._api.identity)
        made, found = self._made(file, name), self._ledger.find(key)
        if found is not None and found.record.id:
            return Outcome("recorded" if found.record.done else "would finish", name, found.record.id)
        if made:
            return Outcome("exists" if file.schedule is None else "would finish", name, made)
        self._checked(file)
        waits = found is not None and not self._ledger.is_stale(found.record)
        return Outcome("claimed" if waits else "would create", name)

    def apply(self, file: RunFile) -> Outcome:
        """Make it exist.

        Raises:
            ValueError: the pipeline version is unknown, or its parameters do not fit.
            ApiError: the server refused or failed.
            TryLater: another submitter has claimed it.
        """
        key, name = file.key(self._api.identity), file.display_name(self._api.identity)
        found = self._ledger.find(key)
        if found is not None and found.record.done:
            return Outcome("recorded", name, found.record.id)
        made = self._made(file, name) or (found.record.id if found is not None else "")
        verb = "exists"
        if not made:
            made = self._create(file, key, name, found)
            verb = "created"
        self._ledger.settle(key, name, made, done=file.schedule is None)
        if file.schedule is not None:
            self._swap(file.name, made)
            self._ledger.settle(key, name, made, done=True)
        return Outcome(verb, name, made)

    def _made(self, file: RunFile, display_name: str) -> str:
        """The id of the run or schedule of this name, if the server has it."""
        if file.schedule is None:
            return next((str(run["run_id"]) for run in self._api.runs_named(display_name)), "")
        named = (item for item in self._api.schedules() if item.get("display_name") == display_name)
        return next((str(item["recurring_run_id"]) for item in named), "")

    def _create(self, file: RunFile, key: str, name: str, found: Found | None) -> str:
        given, local, version = self._checked(file)
        if found is not None and not self._ledger.is_stale(found.record):
            raise TryLater(f"{name}: claimed by another submitter a moment ago; try again")
        claim = self._ledger.claim(key, name, found)
        if claim is None:
            raise TryLater(f"{name}: another submitter was quicker; try again")
        if made := self._made(file, name):  # by the claim's former owner, after we looked
            return made
        try:
            version = version or self._api.ensure_version(local)
            work = Work(
                display_name=name,
                experiment_id=self._api.experiment(file.experiment),
                version=version,
                parameters=given,
                description=f"{_DESCRIPTION} {file.name}, key {key}",
                service_account=self._service_account,
                pipeline_root=self._pipeline_root,
            )
            renewed = self._ledger.renew(claim)
            if renewed is None:
                raise TryLater(f"{name}: another submitter took the claim over; try again")
            claim = renewed
            if file.schedule is None:
                return self._api.create_run(work)
            schedule = file.schedule
            return self._api.create_schedule(work, schedule.trigger(), schedule.max_concurrency, schedule.catchup)
        except ApiError as error:
            if error.refused:
                self._ledger.give_up(claim)
            raise

    def _checked(self, file: RunFile) -> tuple[Object, spec.Pipeline, Version | None]:
        """The parameters by their types, the pipeline, and its version if the server has it."""
        version = self._api.find_version(file.pipeline_name, file.pipelineVersion)
        local = self._known.get(file.pipelineVersion)
        if local is not None:
            given = parameters.collect(local, file.parameters, ())
            parameters.check_remote(local, given)
            return given, local, version
        if version is None:
            ours = [name for name, item in self._known.items() if item.name == file.pipeline_name]
            raise ValueError(
                f"pipelineVersion {file.pipelineVersion} is neither on the server nor in this crosstrain, "
                f"which has {', '.join(ours or self._known)}"
            )
        pipeline = version.pipeline()
        given = parameters.collect(pipeline, file.parameters, ())
        missing = [item.name for item in pipeline.parameters.values() if item.required and item.name not in given]
        if missing:
            raise ValueError(f"{version.name}: not given: {', '.join(missing)}")
        return given, pipeline, version

    def _swap(self, name: str, new: str) -> None:
        """Pause what earlier versions of this file scheduled, then enable the new one, which was made paused."""
        former = re.compile(rf"{re.escape(name)}-[0-9a-f]{{12}}")
        for item in self._api.schedules():
            ours = str(item.get("description", "")).startswith(f"{_DESCRIPTION} {name}, ")
            other = item["recurring_run_id"] != new and item.get("status") != "DISABLED"
            if ours and other and former.fullmatch(item.get("display_name", "")):
                self._api.pause(item["recurring_run_id"])
        self._api.enable(new)


def _known_pipelines(paths: list[Path]) -> dict[str, spec.Pipeline]:
    """Version name to compiled pipeline: those of the package and those at the given paths."""
    loaded = [spec.load(name) for name in (*spec.committed(), *(str(path) for path in paths))]
    return {version_name(pipeline): pipeline for pipeline in loaded}
