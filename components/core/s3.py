"""The Store over S3 and its kin (SeaweedFS, MinIO, Ceph): large objects in parallel parts, conditional writes.

Uploads and downloads are hashed as their bytes pass. Every request body carries a checksum that the
server verifies (MD5 over TLS, SHA-256 in the signature without). An object becomes visible when its last part
is there; parts of an upload that a killed process left are invisible, and the bucket's lifecycle rule for
incomplete uploads removes them.
"""

import hashlib
import io
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from minio import Minio
from minio.datatypes import Part, parse_list_objects
from minio.deleteobjects import DeleteObject
from minio.error import S3Error, ServerError
from minio.helpers import check_bucket_name

from crosstrain.components.core.s3_connection import connect
from crosstrain.components.core.s3_stream import RECEIVED_BYTES, ObjectStream
from crosstrain.components.core.storage import Entry, Store, check_key, place

PART_BYTES = 16 << 20
PARALLEL = 4
MAX_PARTS = 10_000
"""Parts of one upload that S3 allows; parts grow beyond PART_BYTES for objects that would need more."""
BUFFER_BYTES = 256 << 20
"""Large parts are sent by fewer threads, so that about this much is in memory at most, or two parts."""
STREAM_BYTES = 1 << 20

T = TypeVar("T")


class S3Store(Store):
    """Objects under `s3://bucket/prefix`, or `minio://bucket/prefix` for KFP's own store."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.scheme, _, rest = self.uri.partition("://")
        self.bucket, _, prefix = rest.partition("/")
        if not self.bucket:
            raise ValueError(f"{uri}: names no bucket; give {self.scheme}://bucket/prefix")
        check_bucket_name(self.bucket)
        try:
            self._prefix = check_key(prefix) + "/" if prefix else ""
        except ValueError:
            raise ValueError(f"{uri}: the prefix holds an empty, '.' or '..' part; is there a '//' too many?") from None
        connect(self.scheme)

    def child(self, key: str) -> "S3Store":
        return S3Store(f"{self.uri}/{check_key(key.strip('/'))}")

    def call(self, key: str, request: Callable[[Minio], T]) -> T:
        """Make a request about a key through this process's connection; see `Connection.call`."""
        return connect(self.scheme).call(self.locate(key), request)

    def name(self, key: str) -> str:
        """The object's full name in the bucket."""
        return self._prefix + check_key(key)

    def open(self, key: str, offset: int = 0, length: int | None = None) -> BinaryIO:
        return io.BufferedReader(self._stream(key, offset, length), STREAM_BYTES)

    def _stream(self, key: str, offset: int, length: int | None, etag: str = "") -> ObjectStream:
        uri = self.locate(key)
        return ObjectStream(
            self.bucket, self.name(key), uri, partial(connect(self.scheme).call, uri), offset, length, etag
        )

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        with self._stream(key, offset, length) as stream:
            return stream.readall()

    def download(self, key: str, path: Path, hashed: bool = True) -> Entry:
        first, digest = self._stream(key, 0, PART_BYTES), hashlib.sha256()

        def fill(out: BinaryIO) -> None:
            file = out.fileno()

            def fetch(start: int) -> int:
                at = start
                with self._part(key, first, start) as stream:
                    for block in stream.blocks():
                        at += os.pwrite(file, block, at)
                return at

            at = 0
            for end in _in_order(fetch, range(0, max(first.total, 1), PART_BYTES), PARALLEL):
                while hashed and at < end:  # what was just written is still in memory
                    block = os.pread(file, min(RECEIVED_BYTES, end - at), at)
                    digest.update(block)
                    at += len(block)

        place(path, fill, sync=False)
        return Entry(key, first.total, first.etag, digest.hexdigest() if hashed else "")

    def digest(self, key: str) -> Entry:
        first, digest = self._stream(key, 0, PART_BYTES), hashlib.sha256()

        def fetch(start: int) -> bytes:
            with self._part(key, first, start) as stream:
                return stream.readall()

        for part in _in_order(fetch, range(0, max(first.total, 1), PART_BYTES), PARALLEL):
            digest.update(part)
        return Entry(key, first.total, first.etag, digest.hexdigest())

    def _part(self, key: str, first: ObjectStream, start: int) -> ObjectStream:
        """One part of an object, of the version that the first part's stream saw."""
        return first if start == 0 else self._stream(key, start, PART_BYTES, first.etag)

    def upload(self, path: Path, key: str) -> Entry:
        size = path.stat().st_size
        part_bytes = part_size(size)
        with path.open("rb") as stream:
            if size <= part_bytes:
                data = stream.read()
                return Entry(key, len(data), self.write(key, data).etag, hashlib.sha256(data).hexdigest())
            name = self.name(key)
            upload = self.call(key, lambda client: client._create_multipart_upload(self.bucket, name, {}))
            try:
                etag, sha256 = self._send_parts(key, upload, stream, size, part_bytes)
            except BaseException:
                self._abort(key, upload)
                raise
        return Entry(key, size, etag, sha256)

    def _send_parts(self, key: str, upload: str, stream: BinaryIO, size: int, part_bytes: int) -> tuple[str, str]:
        """Send a file in parallel parts and complete the upload; the object's tag and SHA-256."""
        name, digest = self.name(key), hashlib.sha256()

        def blocks() -> Iterator[tuple[int, bytes]]:
            left = size
            for number in range(1, math.ceil(size / part_bytes) + 1):
                data = stream.read(min(part_bytes, left))
                left -= len(data)
                digest.update(data)
                yield number, data
            if left or stream.read(1):
                raise OSError(
                    f"{stream.name}: changed its size while it was stored at {self.locate(key)}; store it again"
                )

        def send(block: tuple[int, bytes]) -> Part:
            number, data = block
            etag = self.call(key, lambda client: client._upload_part(self.bucket, name, data, None, upload, number))
            return Part(number, etag)

        parallel = max(1, min(PARALLEL, BUFFER_BYTES // part_bytes))
        parts = list(_in_order(send, blocks(), parallel))
        return self._complete(key, upload, parts), digest.hexdigest()

    def _complete(self, key: str, upload: str, parts: list[Part]) -> str:
        """Make the uploaded parts an object, also when the answer to an earlier try was lost."""
        name, tries = self.name(key), 0

        def request(client: Minio) -> str:
            nonlocal tries
            tries += 1
            try:
                etag = client._complete_multipart_upload(self.bucket, name, upload, parts).etag
            except S3Error as error:
                if error.code != "NoSuchUpload" or tries == 1:
                    raise
                etag = client.stat_object(self.bucket, name).etag
                if etag != _joined_etag(parts):
                    raise error from None
            if not etag:  # status 200 with an error inside, as S3 allows itself here
                raise ServerError("upload not completed", 500)
            return etag

        return self.call(key, request)

    def _abort(self, key: str, upload: str) -> None:
        name = self.name(key)
        try:
            self.call(key, lambda client: client._abort_multipart_upload(self.bucket, name, upload))
        except OSError:
            return  # what stopped the upload stops this too, and is what the caller has to hear

    def write(self, key: str, data: bytes) -> Entry:
        name = self.name(key)
        result = self.call(key, lambda client: client._put_object(self.bucket, name, data, {}))
        return Entry(key, len(data), result.etag or "")

    def write_if_absent(self, key: str, data: bytes) -> bool:
        return self._write_if(key, data, {"If-None-Match": "*"})

    def write_if_match(self, key: str, data: bytes, etag: str) -> bool:
        return self._write_if(key, data, {"If-Match": f'"{etag}"'})

    def _write_if(self, key: str, data: bytes, condition: dict[str, str]) -> bool:
        """The one conditional write; the library sends no condition with its public put_object."""
        name, tries = self.name(key), 0

        def request(client: Minio) -> bool:
            nonlocal tries
            tries += 1
            try:
                client._put_object(self.bucket, name, data, dict(condition))
            except S3Error as error:
                if error.response.status != 412 and error.code != "NoSuchKey":
                    raise
                return tries > 1 and _holds(client, self.bucket, name, data)
            return True

        return self.call(key, request)

    def stat(self, key: str) -> Entry:
        name = self.name(key)

        def request(client: Minio) -> Entry:
            try:
                found = client.stat_object(self.bucket, name)
            except S3Error as error:
                if error.code == "NoSuchKey":  # so it is called for a missing bucket too
                    client._execute("GET", self.bucket, query_params={"list-type": "2", "max-keys": "1"})
                raise
            return Entry(key, found.size or 0, found.etag or "")

        return self.call(key, request)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        top = self._prefix + (check_key(prefix.strip("/")) + "/" if prefix.strip("/") else "")
        query = {"list-type": "2", "encoding-type": "url", "max-keys": "1000", "prefix": top}
        entries: list[Entry] = []
        more = True
        while more:
            found, more, token, _ = self.call(prefix, lambda client: _list_page(client, self.bucket, query))
            entries += [
                Entry(item.object_name[len(self._prefix) :], item.size or 0, item.etag or "")
                for item in found
                if not item.object_name.endswith("/")
            ]
            query["continuation-token"] = token or ""
        return iter(sorted(entries, key=lambda entry: entry.key))  # SeaweedFS lists a/b before a-b

    def delete(self, key: str) -> None:
        name = self.name(key)
        self.call(key, lambda client: client.remove_object(self.bucket, name))

    def delete_prefix(self, prefix: str) -> int:
        names = [self._prefix + entry.key for entry in self.list(prefix)]
        faults = self.call(
            prefix, lambda client: list(client.remove_objects(self.bucket, [DeleteObject(name) for name in names]))
        )
        if faults:
            raise OSError(f"{self.locate(prefix)}: {len(faults)} of {len(names)} objects stay: {faults[0].code}")
        return len(names)

    def check_writable(self) -> None:
        key = "check-writable"  # an upload that is begun and given up: no object appears
        self._abort(
            key, self.call(key, lambda client: client._create_multipart_upload(self.bucket, self.name(key), {}))
        )


def part_size(size: int) -> int:
    """Bytes in each part of an upload: PART_BYTES, or whole MiB more when that would make too many parts."""
    return max(PART_BYTES, math.ceil(size / MAX_PARTS / (1 << 20)) << 20)


def _in_order(function: Callable[[Any], T], items: Iterable[Any], parallel: int) -> Iterator[T]:
    """`map` in threads: results in order, `parallel` items taken ahead, none more after a failure."""
    with ThreadPoolExecutor(parallel) as pool:
        pending: deque[Future[T]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) == parallel:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _list_page(client: Minio, bucket: str, query: dict[str, str]) -> tuple[list[Any], bool, str | None, str | None]:
    return parse_list_objects(client._execute("GET", bucket, query_params=dict(query)))


def _joined_etag(parts: list[Part]) -> str:
    """The tag that S3 gives to an object of these parts."""
    tags = b"".join(bytes.fromhex(part.etag) for part in parts)
    return f"{hashlib.md5(tags, usedforsecurity=False).hexdigest()}-{len(parts)}"


def _holds(client: Minio, bucket: str, name: str, data: bytes) -> bool:
    with client.get_object(bucket, name) as response:
        return bool(response.read() == data)
