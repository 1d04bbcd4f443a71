"""Reading and writing artifacts: a prefix of objects and the manifest that makes them exist.

An `Artifact` verifies what it hands out; an `ArtifactWriter` stages files on local disk, hashes and stores
them, and writes the manifest last. A prefix without a manifest is no artifact.
"""

import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from crosstrain.components.core.manifest import MANIFEST_NAME, Facts, File, Manifest, Source, decode
from crosstrain.components.core.storage import TEMPORARY, LocalStore, Store, check_key, open_store

log = logging.getLogger(__name__)


class Artifact:
    """An artifact that exists: its manifest, and verified access to its objects, also from many threads."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        """Where the manifest lies."""
        self.files = open_store(manifest.base) if manifest.base else store
        """Where the objects lie."""
        self.manifest = manifest
        self._verified: set[str] = set()
        self._cache: tempfile.TemporaryDirectory[str] | None = None
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        return self.store.uri

    @property
    def facts(self) -> Any:
        return self.manifest.facts

    @classmethod
    def open(cls, uri: str, kind: str | None = None) -> Self:
        """Open the artifact at a prefix (or at its `manifest.json`).

        Raises:
            FileNotFoundError: the prefix holds no manifest: nothing there, or a half-written output.
            ValueError: the manifest is of another kind than `kind`, or does not decode.
        """
        store = open_store(uri.removesuffix("/" + MANIFEST_NAME))
        try:
            data = store.read(MANIFEST_NAME)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(
                f"{store.uri}: no {MANIFEST_NAME} here, so no finished artifact; plain files get in through "
                "import_data or import_model"
            ) from None
        manifest = decode(data, store.locate(MANIFEST_NAME))
        if kind is not None and manifest.kind != kind:
            raise ValueError(f"{store.uri}: this is a {manifest.kind} artifact, and a {kind} artifact is wanted")
        return cls(store, manifest)

    def read(self, path: str) -> bytes:
        """One object's bytes, verified."""
        entry = self.manifest.file(path)
        data = self.files.read(path)
        _check(entry, len(data), hashlib.sha256(data).hexdigest(), self.files.locate(path))
        return data

    def fetch(self, path: str) -> Path:
        """One object as a verified local file: where it lies, or a copy that lives as long as this object."""
        entry = self.manifest.file(path)
        there = self.files.local_path(path)
        local = self._folder() / path if there is None else there
        if path not in self._verified:
            try:
                found = self.files.download(path, local) if there is None else self.files.digest(path)
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{error} (it is listed in the manifest of {self.uri})") from None
            try:
                _check(entry, found.bytes, found.sha256, self.files.locate(path))
            except ValueError:
                if there is None:
                    local.unlink()
                raise
            self._verified.add(path)
        return local

    def release(self, path: str) -> None:
        """Drop the local copy of one object, if `fetch` made one."""
        if self.files.local_path(path) is None and path in self._verified:
            (self._folder() / path).unlink()
            self._verified.discard(path)

    def fetch_all(self, prefix: str = "") -> Path:
        """Every object (under a folder of the artifact), verified; the local folder that holds them."""
        folder = prefix.rstrip("/") + "/" if prefix else ""
        for file in self.manifest.files:
            if file.path.startswith(folder):
                self.fetch(file.path)
        local = self.files.local_path()
        return (local if local is not None else self._folder()) / folder

    def _folder(self) -> Path:
        with self._lock:
            if self._cache is None:
                self._cache = tempfile.TemporaryDirectory(prefix="crosstrain-")
            return Path(self._cache.name)


class ArtifactWriter:
    """Stages, stores and finally commits an artifact. Use as a context manager.

    A failure before `commit` removes what was staged, and folders that would stay empty; objects already stored stay
    invisible, because no manifest names them, and the next try overwrites them. A manifest of an earlier artifact at
    the same prefix is removed before its first object is overwritten.

    Raises:
        PermissionError, FileNotFoundError: on creation, when the prefix cannot be written.
    """

    def __init__(self, uri: str) -> None:
        self.store = open_store(uri)
        self._files: dict[str, File] = {}
        self._replacing = True
        self.store.check_writable()
        local = self.store.local_path()
        self._made = _make_folders(local) if local is not None else []
        self._staging = tempfile.TemporaryDirectory(
            prefix=TEMPORARY + "staging-", dir=local, ignore_cleanup_errors=True
        )
        self.staging = Path(self._staging.name)
        """Scratch folder, on the output's own file system when that is local; gone after the `with` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._staging.cleanup()
        if error is not None:
            for folder in self._made:
                if any(folder.iterdir()):
                    break
                folder.rmdir()

    @contextmanager
    def create(self, path: str) -> Iterator[Path]:
        """A local path to write one object to; it is stored when the block ends without an error."""
        local = self.staging / check_key(path)
        local.parent.mkdir(parents=True, exist_ok=True)
        yield local
        self.add(local, path)

    def add(self, local: Path, path: str) -> File:
        """Store a local file as one object: a file of the staging folder is moved, any other is copied."""
        if check_key(path) == MANIFEST_NAME:
            raise ValueError(f"{MANIFEST_NAME} is written by commit; store the file under another name")
        if self._replacing:
            self.store.delete(MANIFEST_NAME)
            self._replacing = False
        target, staged = self.store.local_path(path), self.staging in local.parents
        if target is not None and staged:
            file = File(path=path, bytes=local.stat().st_size, sha256=hash_file(local))
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(local, target)
        else:
            entry = self.store.upload(local, path)
            file = File(path=path, bytes=entry.bytes, sha256=entry.sha256)
            if staged:
                local.unlink()
        self._files[path] = file
        return file

    @property
    def files(self) -> list[File]:
        """What has been added so far."""
        return list(self._files.values())

    def adopt(self, files: Sequence[File]) -> bool:
        """List objects that an earlier, interrupted try has stored; False if one is not there in its size."""
        for file in files:
            try:
                if self.store.stat(file.path).bytes != file.bytes:
                    return False
            except FileNotFoundError:
                return False
        self._files.update({file.path: file for file in files})
        return True

    def discard(self, path: str) -> None:
        """Take back one object that was added."""
        del self._files[path]
        self.store.delete(path)

    def add_folder(self, folder: Path, prefix: str = "") -> None:
        """Store every file of a local folder under `prefix`, sorted by name."""
        for local in sorted(path for path in folder.rglob("*") if path.is_file()):
            self.add(local, prefix + local.relative_to(folder).as_posix())

    def commit(
        self,
        component: str,
        facts: Facts,
        options: Mapping[str, Any],
        inputs: Mapping[str, Artifact | Source],
    ) -> Artifact:
        """Write the manifest: from here on the artifact exists."""
        manifest = Manifest(
            component=component,
            facts=facts,
            files=tuple(self._files[path] for path in sorted(self._files)),
            options=dict(options),
            inputs={
                name: item.manifest.source() if isinstance(item, Artifact) else item for name, item in inputs.items()
            },
        )
        artifact = commit_manifest(self.store, manifest)
        if (local := self.store.local_path()) is not None:
            for left in local.glob(TEMPORARY + "staging-*"):
                if left != self.staging:
                    shutil.rmtree(left, ignore_errors=True)  # of a try that was killed
        return artifact


def commit_manifest(store: Store, manifest: Manifest) -> Artifact:
    """Write a manifest under a prefix, which makes the artifact exist."""
    store.write(MANIFEST_NAME, manifest.encode())
    size = sum(file.bytes for file in manifest.files)
    log.info("wrote %s artifact: %d files, %d bytes", manifest.kind, len(manifest.files), size)
    return Artifact(store, manifest)


def hash_file(path: Path) -> str:
    """SHA-256 of a local file, as hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_writable(folder: Path) -> None:
    """Make a local folder, or raise PermissionError before any work is done for it."""
    LocalStore(folder).check_writable()
    folder.mkdir(parents=True, exist_ok=True)


def _make_folders(folder: Path) -> list[Path]:
    """Make a folder; those that were not there, the innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _check(entry: File, size: int, digest: str, where: str) -> None:
    if size != entry.bytes or digest != entry.sha256:
        raise ValueError(
            f"{where}: {size} bytes with SHA-256 {digest[:12]}…, and the manifest says {entry.bytes} bytes with "
            f"{entry.sha256[:12]}…; the object is damaged or was replaced: make the artifact again"
        )
