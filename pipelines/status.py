"""`crosstrain status`: what became of each run file of a folder, by ledger and server. Reads only."""

import argparse
import sys

from crosstrain.pipelines import run_file
from crosstrain.pipelines.connect import open_api
from crosstrain.pipelines.kfp_api import Api
from crosstrain.pipelines.kfp_http import ApiError
from crosstrain.pipelines.ledger import Ledger
from crosstrain.pipelines.run_file import RunFile


def main(arguments: argparse.Namespace) -> int:
    """Print one line a file: display name, state, id; 2: a file is wrong."""
    files, refused = run_file.read_folder(arguments.folder)
    ledger, api = Ledger(arguments.ledger, arguments.take_over_after), open_api(arguments)
    for file in files.values():
        state, found = describe(file, api, ledger)
        print(f"{file.display_name(api.identity):<40} {state:<24} {found}".rstrip())
    for line in refused:
        print(f"error: {line}", file=sys.stderr)
    return 2 if refused else 0


def describe(file: RunFile, api: Api, ledger: Ledger) -> tuple[str, str]:
    """A file's state in words, and the id of its run or schedule."""
    key, name = file.key(api.identity), file.display_name(api.identity)
    found = ledger.find(key)
    made = found.record.id if found is not None else ""
    if file.schedule is not None:
        for item in api.schedules():
            if item.get("display_name") == name or item["recurring_run_id"] == made:
                return f"schedule {item.get('status', '').lower() or 'of unknown state'}", item["recurring_run_id"]
        return ("schedule deleted", made) if made else (_claim(found is not None), "")
    run = _run(api, made) if made else next(iter(api.runs_named(name)), None)
    if run is not None:
        return str(run.get("state", "PENDING")).lower(), str(run["run_id"])
    return ("history collected", made) if made else (_claim(found is not None), "")


def _claim(claimed: bool) -> str:
    return "claimed" if claimed else "not submitted"


def _run(api: Api, run_id: str) -> dict[str, object] | None:
    try:
        return api.run(run_id)
    except ApiError as error:
        if error.status == 404:
            return None
        raise
