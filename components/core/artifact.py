"""Reading and writing artifacts: a prefix of objects and the manifest that makes them exist.

An `Artifact` verifies what it hands out; an `ArtifactWriter` stages files on local disk, hashes and stores
them, and writes the manifest last. A prefix without a manifest is no artifact.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from crosstrain.components.core.manifest import MANIFEST_NAME, Facts, File, Manifest, Source, decode
from crosstrain.components.core.storage import Store, check_key, open_store

log = logging.getLogger(__name__)


class Artifact:
    """An artifact that exists: its manifest, and verified access to its objects."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        """Where the manifest lies."""
        self.files = open_store(manifest.base) if manifest.base else store
        """Where the objects lie."""
        self.manifest = manifest
        self._verified: set[str] = set()
        self._cache: tempfile.TemporaryDirectory[str] | None = None

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
        except FileNotFoundError:
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
        local = self.files.local_path(path)
        if local is None:
            local = self._folder() / path
        if path not in self._verified:
            if self.files.local_path(path) is None:
                local.parent.mkdir(parents=True, exist_ok=True)
                self.files.download(path, local)
            if not local.is_file():
                raise FileNotFoundError(f"{self.files.locate(path)}: listed in the manifest, and not there")
            _check(entry, local.stat().st_size, hash_file(local), self.files.locate(path))
            self._verified.add(path)
        return local

    def release(self, path: str) -> None:
        """Drop the local copy of one object, if `fetch` made one."""
        if self.files.local_path(path) is None and path in self._verified:
            (self._folder() / path).unlink()
            self._verified.discard(path)

    def fetch_all(self, prefix: str = "") -> Path:
        """Every object (under a folder of the artifact), verified; the local folder that holds them."""
        for file in self.manifest.files:
            if file.path.startswith(prefix):
                self.fetch(file.path)
        local = self.files.local_path()
        return (local if local is not None else self._folder()) / prefix

    def _folder(self) -> Path:
        if self._cache is None:
            self._cache = tempfile.TemporaryDirectory(prefix="crosstrain-")
        return Path(self._cache.name)


class ArtifactWriter:
    """Stages, stores and finally commits an artifact. Use as a context manager.

    A failure before `commit` removes what was staged; objects already stored stay invisible, because
    no manifest names them, and the next try overwrites them.
    """

    def __init__(self, uri: str) -> None:
        self.store = open_store(uri)
        self._files: dict[str, File] = {}
        local = self.store.local_path()
        if local is not None:
            check_writable(local)
        self._staging = tempfile.TemporaryDirectory(
            prefix=".crosstrain-staging-", dir=local, ignore_cleanup_errors=True
        )
        self.staging = Path(self._staging.name)
        """Scratch folder, on the output's own file system when that is local; gone after the `with` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._staging.cleanup()

    @contextmanager
    def create(self, path: str) -> Iterator[Path]:
        """A local path to write one object to; it is stored when the block ends without an error."""
        local = self.staging / check_key(path)
        local.parent.mkdir(parents=True, exist_ok=True)
        yield local
        self.add(local, path)

    def add(self, local: Path, path: str) -> File:
        """Store a local file as one object: a file of the staging folder is moved, any other is copied."""
        file = File(path=path, bytes=local.stat().st_size, sha256=hash_file(local))
        target = self.store.local_path(path)
        if target is not None and self.staging in local.parents:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(local, target)
        else:
            self.store.upload(local, path)
            if self.staging in local.parents:
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
            inputs={name: item.manifest.source() if isinstance(item, Artifact) else item for name, item in inputs.items()},
        )
        return commit_manifest(self.store, manifest)


def commit_manifest(store: Store, manifest: Manifest) -> Artifact:
    """Write a manifest under a prefix, which makes the artifact exist."""
    store.write(MANIFEST_NAME, manifest.encode())
    log.info("wrote %s artifact: %d files, %d bytes", manifest.kind, len(manifest.files), sum(f.bytes for f in manifest.files))
    return Artifact(store, manifest)


def hash_file(path: Path) -> str:
    """SHA-256 of a local file, as hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_writable(folder: Path) -> None:
    """Make a local folder, or raise PermissionError before any work is done for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PermissionError(f"{folder}: cannot write the output here ({error.strerror}); choose another output") from None


def _check(entry: File, size: int, digest: str, where: str) -> None:
    if size != entry.bytes or digest != entry.sha256:
        raise ValueError(
            f"{where}: {size} bytes with SHA-256 {digest[:12]}…, and the manifest says {entry.bytes} bytes with "
            f"{entry.sha256[:12]}…; the object is damaged or was replaced: make the artifact again"
        )
