"""Object storage behind one small interface: a `Store` is a URI prefix, and keys are relative to it.

`open_store("s3://bucket/prefix")` and `open_store("/a/folder")` behave alike, so that a step never asks
where its bytes live. A key is a relative POSIX path; what it names is either whole or absent: a writer
that dies leaves nothing under the key. Left out on purpose: append, rename and permissions.
"""

import fcntl
import hashlib
import io
import os
import tempfile
import uuid
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
    sha256: str = ""
    """SHA-256 of the content, where the call read or wrote all of it: `upload`, `download`, `digest`."""


class Store(ABC):
    """Bytes under one URI prefix; may be pickled, and used after a fork and by many threads.

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
        """A seekable stream over an object's bytes [offset, offset + length), empty past its end; close it."""

    @abstractmethod
    def upload(self, path: Path, key: str) -> Entry:
        """Store a local file, in parts when large, checksummed on the way and hashed in the same pass."""

    @abstractmethod
    def download(self, key: str, path: Path, hashed: bool = True) -> Entry:
        """Fetch an object into a local file, which appears only when whole; `hashed` in the same pass."""

    @abstractmethod
    def digest(self, key: str) -> Entry:
        """Read an object whole for its SHA-256."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> Entry:
        """Store bytes, replacing what was there."""

    @abstractmethod
    def write_if_absent(self, key: str, data: bytes) -> bool:
        """Store bytes only if the key does not exist; False when it does.

        One of many racing writers wins. Racing writers should write different bytes: when an answer is lost,
        the bytes found tell whether the write took place.
        """

    @abstractmethod
    def write_if_match(self, key: str, data: bytes, etag: str) -> bool:
        """Replace an object only if it still has this version tag; False when it has not. See `write_if_absent`."""

    @abstractmethod
    def stat(self, key: str) -> Entry:
        """Size and version tag of one object."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every object under the folder `prefix` (with or without a trailing slash), sorted by key."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete one object; a missing one is no error."""

    @abstractmethod
    def delete_prefix(self, prefix: str) -> int:
        """Delete every object under the folder `prefix`; the number deleted.

        Whoever deletes an artifact deletes its manifest first, so that no half of it seems whole.
        """

    @abstractmethod
    def check_writable(self) -> None:
        """Raise PermissionError or FileNotFoundError now, and leave nothing behind, if writing here would."""

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

    def check_conditional_writes(self) -> None:
        """Try on a scratch object that `write_if_absent` and `write_if_match` hold back; OSError if they do not.

        Some S3 servers, and older versions of others, ignore the conditions and overwrite.
        """
        key = f"{TEMPORARY}probe-{uuid.uuid4().hex}"
        try:
            first = self.write_if_absent(key, b"first")
            second = self.write_if_absent(key, b"second")
            stale = self.write_if_match(key, b"stale", "0" * 32)
            fresh = self.write_if_match(key, b"fresh", self.stat(key).etag)
        finally:
            self.delete(key)
        if (first, second, stale, fresh) != (True, False, False, True):
            raise OSError(
                f"{self.uri}: the server ignores conditional writes (If-None-Match, If-Match), which keep two runs "
                "from writing over each other; use a newer version or another store"
            )


def open_store(uri: str) -> Store:
    """The store for `s3://bucket/prefix`, `minio://bucket/prefix`, `file:///folder` or a folder's path.

    Raises:
        ValueError: the scheme is unknown, the bucket is missing or misnamed, or an S3 prefix holds an empty
            part ('//').
    """
    scheme = urlsplit(uri).scheme if "://" in uri else ""
    if scheme in ("s3", "minio"):
        from crosstrain.components.core.s3 import S3Store

        return S3Store(uri)
    if scheme == "file":
        parts = urlsplit(uri)
        if parts.netloc not in ("", "localhost"):
            raise ValueError(f"{uri}: names the host {parts.netloc!r}; a local folder is file:///folder")
        return LocalStore(unquote(parts.path))
    if scheme:
        raise ValueError(f"{uri}: unknown scheme {scheme!r}; use s3://, minio://, file:// or a path")
    if not uri:
        raise ValueError("an empty URI names no store; give s3://bucket/prefix or a folder")
    return LocalStore(uri)


def check_key(key: str) -> str:
    """Refuse a key that is empty, absolute, climbs out, or holds a backslash (which SeaweedFS turns into '/')."""
    if any(part in ("", ".", "..") for part in key.split("/")) or "\0" in key or "\\" in key:
        raise ValueError(f"{key!r} is not a relative key without '', '.' and '..' parts and without backslashes")
    return key


def place(
    target: Path,
    fill: Callable[[BinaryIO], object],
    publish: Callable[[str, Path], object] = os.replace,
    sync: bool = True,
) -> None:
    """Make a file appear whole: fill a temporary one beside it, flush it to disk (`sync`), publish it by its name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=TEMPORARY, dir=target.parent)
    try:
        with os.fdopen(handle, "w+b") as stream:
            fill(stream)
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
        Path(name).chmod(0o666 & ~_UMASK)
        publish(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


class RangeStream(io.RawIOBase):
    """Some bytes as a seekable file; who derives from it reads them."""

    def __init__(self) -> None:
        super().__init__()
        self._position = 0

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes in the stream."""

    @abstractmethod
    def fill(self, view: memoryview) -> int:
        """Read at least one byte from `tell()` on into `view`, which is not empty and ends within the stream."""

    def moved(self) -> None:
        """Called when the position was changed by `seek`."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        target = max(base + offset, 0)
        if target != self._position:
            self._position = target
            self.moved()
        return target

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        view = memoryview(buffer)[: max(self.size - self._position, 0)]
        count = self.fill(view) if view else 0
        self._position += count
        return count


class LocalStore(Store):
    """A folder with a Store's manners: an object appears by rename, so half-written ones do not exist."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(os.path.abspath(folder))
        super().__init__(str(self.folder))

    def child(self, key: str) -> "LocalStore":
        return LocalStore(self._path(key.strip("/")))

    def _path(self, key: str) -> Path:
        return self.folder / check_key(key)

    def open(self, key: str, offset: int = 0, length: int | None = None) -> BinaryIO:
        stream = self._path(key).open("rb")
        if offset == 0 and length is None:
            return stream
        return io.BufferedReader(_Window(stream, offset, length))

    def upload(self, path: Path, key: str) -> Entry:
        return _copy(path, self._path(key), lambda: self.stat(key))

    def download(self, key: str, path: Path, hashed: bool = True) -> Entry:
        return _copy(self._path(key), path, lambda: self.stat(key), hashed)

    def digest(self, key: str) -> Entry:
        with self._path(key).open("rb") as stream:
            return _hashed(self.stat(key), hashlib.file_digest(stream, "sha256").hexdigest())

    def write(self, key: str, data: bytes) -> Entry:
        place(self._path(key), lambda stream: stream.write(data))
        return self.stat(key)

    def write_if_absent(self, key: str, data: bytes) -> bool:
        try:
            place(self._path(key), lambda stream: stream.write(data), publish=os.link)
        except FileExistsError:
            return False
        return True

    def write_if_match(self, key: str, data: bytes, etag: str) -> bool:
        if not self.exists(key):
            return False
        with _locked(self._path(key).parent):
            if not self.exists(key) or self.stat(key).etag != etag:
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
        top = self._path(prefix.strip("/")) if prefix.strip("/") else self.folder
        keys = []
        for folder, folders, names in os.walk(top):
            folders[:] = [name for name in folders if not name.startswith(TEMPORARY)]
            here = Path(folder).relative_to(self.folder)
            keys += [(here / name).as_posix() for name in names if not name.startswith(TEMPORARY)]
        return (self.stat(key) for key in sorted(keys))

    def delete(self, key: str) -> None:
        path = self._path(key)
        path.unlink(missing_ok=True)
        for parent in path.parents:
            if parent == self.folder or not _remove_if_empty(parent):
                break

    def delete_prefix(self, prefix: str) -> int:
        keys = [entry.key for entry in self.list(prefix)]
        for key in keys:
            self.delete(key)
        return len(keys)

    def check_writable(self) -> None:
        there = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        try:
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            raise PermissionError(
                f"{self.folder}: cannot write the output here ({error.strerror}); choose another output"
            ) from None

    def local_path(self, key: str = "") -> Path | None:
        return self._path(key) if key else self.folder


class _Window(RangeStream):
    """The bytes [offset, offset + length) of a file, as a file of their own; owns the file."""

    def __init__(self, file: BinaryIO, offset: int, length: int | None) -> None:
        super().__init__()
        size = os.fstat(file.fileno()).st_size
        self._file, self._offset = file, min(offset, size)
        self._size = size - self._offset if length is None else min(length, size - self._offset)

    @property
    def size(self) -> int:
        return self._size

    def fill(self, view: memoryview) -> int:
        return os.preadv(self._file.fileno(), [view], self._offset + self.tell())

    def close(self) -> None:
        self._file.close()
        super().close()


def _copy(source: Path, target: Path, stat: Callable[[], Entry], hashed: bool = True) -> Entry:
    digest = hashlib.sha256()
    with source.open("rb") as stream:

        def fill(out: BinaryIO) -> None:
            while block := stream.read(_BLOCK_BYTES):
                if hashed:
                    digest.update(block)
                out.write(block)

        place(target, fill)
    return _hashed(stat(), digest.hexdigest() if hashed else "")


def _hashed(entry: Entry, sha256: str) -> Entry:
    return Entry(entry.key, entry.bytes, entry.etag, sha256)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


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


TEMPORARY = ".crosstrain-"
"""What the names of temporary files and folders begin with; no listing shows them."""
_UMASK = _read_umask()
_BLOCK_BYTES = 1 << 20
