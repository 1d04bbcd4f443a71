"""Object storage behind one small interface: a `Store` is a URI prefix, and keys are relative to it.

`open_store("s3://bucket/prefix")` and `open_store("/a/folder")` behave alike, so that a step never asks
where its bytes live. A key is a relative POSIX path; what it names is either whole or absent: a writer
that dies leaves nothing under the key. Left out on purpose: append, rename and permissions.
"""

import fcntl
import io
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class Entry:
    """One stored object: its key relative to the store, its size in bytes, and its version tag."""

    key: str
    bytes: int
    etag: str


class Store(ABC):
    """Bytes under one URI prefix.

    Raises (all methods): FileNotFoundError for a missing key or bucket, PermissionError for refused or
    expired credentials, OSError for anything else that retries did not cure; each message names the URI
    and what to do.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        """The prefix, without a trailing slash."""

    def locate(self, key: str) -> str:
        """The full URI of a key."""
        return f"{self.uri}/{key}" if key else self.uri

    @abstractmethod
    def child(self, key: str) -> "Store":
        """The store whose prefix is this one's extended by `key`."""

    @abstractmethod
    def open(self, key: str, offset: int = 0, length: int | None = None) -> BinaryIO:
        """A stream over an object's bytes [offset, offset + length); close it."""

    @abstractmethod
    def upload(self, path: Path, key: str) -> Entry:
        """Store a local file, in parts when large, checksummed on the way."""

    @abstractmethod
    def download(self, key: str, path: Path) -> None:
        """Fetch an object into a local file, which appears only when whole."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> Entry:
        """Store bytes, replacing what was there."""

    @abstractmethod
    def write_if_absent(self, key: str, data: bytes) -> bool:
        """Store bytes only if the key does not exist; False when it does. One of many racing writers wins."""

    @abstractmethod
    def write_if_match(self, key: str, data: bytes, etag: str) -> bool:
        """Replace an object only if it still has this version tag; False when it has not."""

    @abstractmethod
    def stat(self, key: str) -> Entry:
        """Size and version tag of one object."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every object under the folder `prefix` (with or without a trailing slash), sorted by key."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete one object; a missing one is no error."""

    def delete_prefix(self, prefix: str) -> int:
        """Delete every object under the folder `prefix`; the number deleted."""
        keys = [entry.key for entry in self.list(prefix)]
        for key in keys:
            self.delete(key)
        return len(keys)

    def exists(self, key: str) -> bool:
        """Whether the key names an object."""
        try:
            self.stat(key)
        except FileNotFoundError:
            return False
        return True

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """An object's bytes [offset, offset + length)."""
        with self.open(key, offset, length) as stream:
            return stream.read()

    def local_path(self, key: str = "") -> Path | None:
        """Where the key already lies on this machine's disk, or None when it has to be downloaded."""
        return None


def open_store(uri: str) -> Store:
    """The store for `s3://bucket/prefix`, `minio://bucket/prefix`, `file:///folder` or a folder's path.

    Raises:
        ValueError: the scheme is unknown, the bucket is missing, or the prefix holds an empty part ('//').
    """
    scheme = urlsplit(uri).scheme if "://" in uri else ""
    if scheme in ("s3", "minio"):
        from crosstrain.components.core.s3 import S3Store

        return S3Store(uri)
    if scheme == "file":
        return LocalStore(unquote(urlsplit(uri).path))
    if scheme:
        raise ValueError(f"{uri}: unknown scheme {scheme!r}; use s3://, minio://, file:// or a path")
    if not uri:
        raise ValueError("an empty URI names no store; give s3://bucket/prefix or a folder")
    return LocalStore(uri)


def check_key(key: str) -> str:
    """Refuse a key that is empty, absolute, or climbs out of its store."""
    parts = key.split("/")
    if not key or key.startswith("/") or any(part in ("", ".", "..") for part in parts) or "\0" in key:
        raise ValueError(f"{key!r} is not a relative key without '', '.' and '..' parts")
    return key


class LocalStore(Store):
    """A folder with a Store's manners: an object appears by rename, so half-written ones do not exist."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(os.path.abspath(folder))
        super().__init__(str(self.folder))

    def child(self, key: str) -> "LocalStore":
        return LocalStore(self.folder / check_key(key.strip("/")))

    def _path(self, key: str) -> Path:
        return self.folder / check_key(key)

    def open(self, key: str, offset: int = 0, length: int | None = None) -> BinaryIO:
        stream = self._path(key).open("rb")
        stream.seek(offset)
        if length is None:
            return stream
        with stream:
            return io.BytesIO(stream.read(length))

    def upload(self, path: Path, key: str) -> Entry:
        return self._replace(key, lambda target: shutil.copyfile(path, target))

    def download(self, key: str, path: Path) -> None:
        source = self._path(key)
        LocalStore(path.parent)._replace(path.name, lambda target: shutil.copyfile(source, target))

    def write(self, key: str, data: bytes) -> Entry:
        return self._replace(key, lambda target: target.write_bytes(data))

    def write_if_absent(self, key: str, data: bytes) -> bool:
        try:
            self._replace(key, lambda target: target.write_bytes(data), publish=os.link)
        except FileExistsError:
            return False
        return True

    def write_if_match(self, key: str, data: bytes, etag: str) -> bool:
        with self._lock(key):
            try:
                if self.stat(key).etag != etag:
                    return False
            except FileNotFoundError:
                return False
            self.write(key, data)
        return True

    def stat(self, key: str) -> Entry:
        path = self._path(key)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
        status = path.stat()
        return Entry(key, status.st_size, f"{status.st_mtime_ns}-{status.st_ino}-{status.st_size}")

    def list(self, prefix: str = "") -> Iterator[Entry]:
        top = self.folder / check_key(prefix.strip("/")) if prefix.strip("/") else self.folder
        keys = []
        for folder, _, names in os.walk(top):
            keys += [
                (Path(folder) / name).relative_to(self.folder).as_posix()
                for name in names
                if not name.startswith(_TEMPORARY)
            ]
        return (self.stat(key) for key in sorted(keys))

    def delete(self, key: str) -> None:
        path = self._path(key)
        path.unlink(missing_ok=True)
        for parent in path.parents:
            if parent == self.folder or not _remove_if_empty(parent):
                break

    def local_path(self, key: str = "") -> Path | None:
        return self._path(key) if key else self.folder

    def _replace(self, key: str, fill: Callable[[Path], object], publish: Callable = os.replace) -> Entry:
        """Fill a temporary file beside the target, flush it to disk, and publish it under its name."""
        target = self._path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=target.parent)
        os.close(handle)
        try:
            fill(Path(name))
            with open(name, "rb") as written:
                os.fsync(written.fileno())
            os.chmod(name, 0o666 & ~_UMASK)
            publish(name, target)
        finally:
            Path(name).unlink(missing_ok=True)
        return self.stat(key)

    @contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / f"{_TEMPORARY}{path.name}.lock").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield


def _remove_if_empty(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


def _read_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


_TEMPORARY = ".crosstrain-"
_UMASK = _read_umask()
