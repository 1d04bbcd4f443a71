"""Take a user's text files in as a corpus artifact, by reference: the manifest lists them, nothing is copied.

What a file holds is told from its name; what is in it is tokenize's to judge.
"""

import logging
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from typing import Literal

from crosstrain.components.core.artifact import commit_manifest
from crosstrain.components.core.manifest import CorpusFacts, File, Manifest
from crosstrain.components.core.step import Result
from crosstrain.components.core.storage import Entry, Store, open_store
from crosstrain.components.import_data.config import Config

log = logging.getLogger(__name__)

Format = Literal["jsonl", "parquet", "text"]

FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
}
"""What a file's suffix says of its content."""

COMPRESSIONS = (".gz", ".zst")

_HASHED_AT_ONCE = 8


def run(config: Config) -> Result:
    """Write the corpus manifest.

    Raises:
        FileNotFoundError: the source names nothing.
        ValueError: no file matches, all are empty, or their formats are mixed or unknown.
    """
    output = open_store(config.output)
    output.check_writable()
    store, entries = find_files(config.source, config.include)
    if store.uri == open_store(config.source).uri and f"{output.uri}/".startswith(f"{store.uri}/"):
        raise ValueError(f"{config.output}: the output lies inside the source folder; choose another output")
    form = config.format if config.format != "auto" else detect_format(store, entries)
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
        files = tuple(pool.map(lambda entry: hash_file(store, entry), entries))
    manifest = Manifest(
        component="import_data",
        facts=CorpusFacts(format=form),
        files=files,
        options=config.options(),
        inputs={},
        base=store.uri,
    )
    total = sum(file.bytes for file in files)
    return Result(commit_manifest(output, manifest), {"files": len(files), "input_bytes": total})


def find_files(source: str, include: str) -> tuple[Store, list[Entry]]:
    """The store that holds the source and its data files, sorted by key; see `run` for what is refused."""
    location = source.rstrip("/")
    parent, slash, name = location.rpartition("/")
    if not parent.endswith("/"):  # otherwise it is a bucket, which has no parent
        folder = open_store(parent or slash or ".")
        if name and folder.exists(name):
            return folder, _without_empty(source, [folder.stat(name)])
    store = open_store(location or source)
    entries = [entry for entry in store.list() if not _hidden(entry.key)]
    if not entries:
        raise FileNotFoundError(f"{source}: no file and no prefix with files; check the name")
    matching = [entry for entry in entries if fnmatchcase(entry.key, include)]
    if not matching:
        raise ValueError(
            f"{source}: none of {len(entries)} files matches include={include!r}; one is {entries[0].key!r}"
        )
    return store, _without_empty(source, matching)


def _without_empty(source: str, entries: list[Entry]) -> list[Entry]:
    full = [entry for entry in entries if entry.bytes]
    if not full:
        raise ValueError(f"{source}: {len(entries)} files, all of them empty; give files with documents")
    for entry in entries:
        if not entry.bytes:
            log.warning("%s: empty file, left out", entry.key)
    return full


def _hidden(key: str) -> bool:
    return any(part.startswith((".", "_")) for part in key.split("/"))


def detect_format(store: Store, entries: list[Entry]) -> Format:
    """The one format that all suffixes name."""
    found: defaultdict[Format | None, list[str]] = defaultdict(list)
    for entry in entries:
        found[format_of(entry.key)].append(entry.key)
    if None in found:
        raise ValueError(
            f"{store.locate(found[None][0])}: cannot tell the format from this name; known: {' '.join(FORMATS)} "
            f"(also with {' or '.join(COMPRESSIONS)}); set format, or leave the file out with include"
        )
    if len(found) > 1:
        examples = "; ".join(f"{form}: {len(keys)} files such as {keys[0]!r}" for form, keys in found.items())
        raise ValueError(f"{store.uri}: mixed formats ({examples}); import them one by one with include")
    (form,) = (form for form in found if form is not None)
    return form


def format_of(key: str) -> Format | None:
    """What a file's name says it holds, None when it says nothing."""
    name = key.lower()
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    return next((form for suffix, form in FORMATS.items() if name.endswith(suffix)), None)


def hash_file(store: Store, entry: Entry) -> File:
    """A file's entry in the manifest, hashed as a stream."""
    found = store.digest(entry.key)
    if found.bytes != entry.bytes:
        raise ValueError(
            f"{store.locate(entry.key)}: listed with {entry.bytes} bytes and read with {found.bytes}; is it being "
            "written? Import it when it is whole"
        )
    return File(path=entry.key, bytes=found.bytes, sha256=found.sha256)
