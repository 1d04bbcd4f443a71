"""Options of import_data."""

from typing import Literal

from crosstrain.components.core.config import Config as BaseConfig
from crosstrain.components.core.config import OutputURI, SourceURI


class Config(BaseConfig):
    """Make a corpus artifact of text files where they lie: every file is listed with its size and SHA-256."""

    source: SourceURI
    """A file, a folder or an object-store prefix (path, file://, s3://) with documents. Hidden files (a name
    that begins with '.' or '_') are left out."""
    output: OutputURI
    """Where to write the corpus manifest; the files themselves stay where they are."""
    format: Literal["auto", "jsonl", "parquet", "text"] = "auto"
    """What every file holds; auto tells from the suffixes: .jsonl .ndjson .json, .parquet, .txt .text .md .rst,
    each also with .gz or .zst."""
    include: str = "*"
    """Shell pattern of the files to take, matched against the path below the source: '*.jsonl.gz'."""
