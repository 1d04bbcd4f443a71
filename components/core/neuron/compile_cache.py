"""Compiled Neuron graphs kept in the store, and the command that stands in front of a node's launcher to use them.

    python -m crosstrain.components.core.neuron.compile_cache --cache s3://lake/graphs [--compile] -- torchrun …

fetches what the prefix holds into a folder of the node, names that folder to the compiler, and becomes the command.
With --compile it runs the command under `neuron_parallel_compile`, which finds the graphs in a trial run and compiles
them, checks that each one compiled, and stores what is new. Entries are named by the hash of graph and flags and by the
compiler's version, so a stale one is never used. A node's entry is stored with its mark `model.done` last, and one
without it does not exist. Left out on purpose: removing old entries.

Source of the layout: libneuronxla's cache, `neuronxcc-<version>/MODULE_<graph>+<flags>/model.neff`.
"""

import argparse
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from crosstrain.components.core import telemetry
from crosstrain.components.core.storage import Store, open_store

log = logging.getLogger(__name__)

FOLDER = "crosstrain-neuron-graphs"
"""Under the node's temporary folder."""
FLAGS, CACHE_URL = "NEURON_CC_FLAGS", "NEURON_COMPILE_CACHE_URL"
NEFF, DONE = "model.neff", "model.done"
_ENTRY = re.compile(r"(neuronxcc-[^/]+/MODULE_[^/]+)/([^/]+)")
_NOT_STORED = (".lock", ".log")


def front(cache: str, compiling: bool, python: str = "python3") -> tuple[str, ...]:
    """The command to put in front of a launcher; see `Job.front`."""
    command = (python, "-m", "crosstrain.components.core.neuron.compile_cache", "--cache", cache)
    return (*command, *(("--compile",) if compiling else ()), "--")


def environment(folder: Path, given: Mapping[str, str]) -> dict[str, str]:
    """The variables with one place for compiled graphs, where two could be named: the compiler has a flag and a URL."""
    flags = re.sub(r"\s*--(cache_dir[= ]\S+|no-cache)", "", given.get(FLAGS, "")).strip()
    made = {name: value for name, value in given.items() if name != CACHE_URL}
    return {**made, FLAGS: f"{flags} --cache_dir={folder}".strip()}


def fetch(store: Store, folder: Path) -> int:
    """Copy finished entries that the folder lacks; how many."""
    entries = _by_entry([entry.key for entry in store.list()])
    count = 0
    for name, files in sorted(entries.items()):
        if DONE not in files or (folder / name / DONE).exists():
            continue
        for file in _done_last(files):
            store.download(f"{name}/{file}", folder / name / file)
        count += 1
    return count


def store_new(folder: Path, store: Store) -> int:
    """Store finished entries that the prefix lacks; how many."""
    there = _by_entry([entry.key for entry in store.list()])
    count = 0
    for name, files in sorted(_local(folder).items()):
        if DONE not in files or DONE in there.get(name, ()):
            continue
        for file in _done_last(files):
            if not file.endswith(_NOT_STORED):
                store.upload(folder / name / file, f"{name}/{file}")
        count += 1
    return count


def check_compiled(folder: Path) -> int:
    """How many graphs there are, all of them compiled.

    Raises:
        ValueError: one is not, with the compiler's own last words; or there is none.
    """
    entries = _local(folder)
    if not entries:
        raise ValueError(f"{folder}: the trial run found no graph to compile; did it run on NeuronCores?")
    failed = sorted(name for name, files in entries.items() if NEFF not in files)
    if failed:
        words = folder / failed[0] / "model.log"
        said = " ".join(words.read_text(errors="replace").split())[-500:] if words.is_file() else "no log"
        raise ValueError(f"{len(failed)} of {len(entries)} graphs did not compile; {failed[0]}: {said}")
    return len(entries)


def _local(folder: Path) -> dict[str, set[str]]:
    return _by_entry([path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()])


def _by_entry(keys: Sequence[str]) -> dict[str, set[str]]:
    entries: dict[str, set[str]] = {}
    for key in keys:
        if match := _ENTRY.fullmatch(key):
            entries.setdefault(match[1], set()).add(match[2])
    return entries


def _done_last(files: set[str]) -> list[str]:
    return sorted(files, key=lambda file: (file == DONE, file))


def run(cache: str, command: Sequence[str], compiling: bool) -> None:
    """Become the command, with the graphs at hand; or run it to compile them, and return.

    Raises:
        ValueError: a graph did not compile.
        OSError: neuron_parallel_compile failed, or is not there.
    """
    folder = Path(tempfile.gettempdir()) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    store = open_store(cache)
    store.check_writable()
    log.info("%s: %d compiled graphs fetched to %s", store.uri, fetch(store, folder), folder)
    variables = environment(folder, os.environ)
    if not compiling:
        os.execvpe(command[0], list(command), variables)
    _run_to_the_end(["neuron_parallel_compile", *command], variables)
    count = check_compiled(folder)
    log.info("%d graphs, %d of them new in %s", count, store_new(folder, store), store.uri)


def _run_to_the_end(command: list[str], variables: Mapping[str, str]) -> None:
    child = subprocess.Popen(command, env=dict(variables))

    def stop(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code:
        raise OSError(f"{command[0]} ended with status {code}; its lines above say why")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of the module's docstring; status 1 with one `error:` line."""
    parser = argparse.ArgumentParser(description="Run a command with compiled Neuron graphs out of a store.")
    parser.add_argument("--cache", required=True, help="prefix that keeps the graphs")
    parser.add_argument("--compile", action="store_true", help="compile what the command's trial run needs")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --, the launcher and its arguments")
    given = parser.parse_args(arguments)
    telemetry.start("compile_cache")
    try:
        run(given.cache, given.command, given.compile)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
