"""Reading one S3 object as a file: ranged, seekable, and taken up where it broke when the connection is cut.

Repeating, renewing credentials and naming errors is the connection's part; here is only what a stream adds:
the position, and the version that was opened, so that two versions of an object are never mixed.
"""

from collections.abc import Callable, Iterator
from typing import Any

from minio import Minio
from minio.error import S3Error
from urllib3.exceptions import ProtocolError

from crosstrain.components.core.storage import RangeStream

RECEIVED_BYTES = 1 << 20
"""Bytes taken from the connection at a time: what is received again, at most, after a cut."""


WHOLE_BYTES = 4 << 20
"""Bytes that are taken at once where all of a stream is wanted."""


class ObjectStream(RangeStream):
    """An object's bytes [offset, offset + length) as a file; a cut connection is taken up where it broke."""

    def __init__(
        self,
        bucket: str,
        name: str,
        uri: str,
        call: Callable[[Callable[[Minio], Any]], Any],
        offset: int = 0,
        length: int | None = None,
        etag: str = "",
    ) -> None:
        super().__init__()
        self._bucket, self._name, self._uri, self._call = bucket, name, uri, call
        self._offset = offset
        self._wanted = length
        self._response: Any = None
        self.etag = etag
        """Version that is read; a later one is an error, never mixed in."""
        self.total = 0
        """Size of the whole object in bytes."""
        call(self._request)

    @property
    def size(self) -> int:
        left = max(self.total - self._offset, 0)
        return left if self._wanted is None else min(self._wanted, left)

    def fill(self, view: memoryview) -> int:
        block = self._block(min(len(view), RECEIVED_BYTES))
        view[: len(block)] = block
        return len(block)

    def blocks(self) -> Iterator[bytes]:
        """What is left of the stream, as it was received: without a copy."""
        while (left := self.size - self._position) > 0:
            block = self._block(min(left, RECEIVED_BYTES))
            self._position += len(block)
            yield block

    def readall(self) -> bytes:
        left = max(self.size - self._position, 0)
        if left > WHOLE_BYTES:
            return b"".join(self.blocks())
        block: bytes = self._call(lambda client: self._receive(client, left, all_of_it=True)) if left else b""
        self._position += left
        return block

    def moved(self) -> None:
        self._drop()

    def close(self) -> None:
        self._drop()
        super().close()

    def _drop(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def _request(self, client: Minio) -> None:
        start = self._offset + self._position
        end = "" if self._wanted is None else str(self._offset + max(self._wanted, 1) - 1)
        headers: dict[str, Any] = {"Range": f"bytes={start}-{end}"} if start or end else {}
        if self.etag:
            headers["If-Match"] = f'"{self.etag}"'
        try:
            self._response = client.get_object(self._bucket, self._name, request_headers=headers)
        except S3Error as error:
            if error.response.status == 412:
                raise OSError(f"{self._uri}: was replaced while it was read; read it again") from None
            if error.response.status != 416:
                raise
            found = client.stat_object(self._bucket, self._name)  # the range begins past the end: nothing to read
            self.etag, self.total = found.etag or "", found.size or 0
            return
        self.etag = self._response.headers.get("ETag", "").strip('"')
        whole = self._response.headers.get("Content-Range", "").rpartition("/")[2]
        self.total = int(whole or self._response.headers["Content-Length"])

    def _block(self, wanted: int) -> bytes:
        block: bytes = self._call(lambda client: self._receive(client, wanted))
        return block

    def _receive(self, client: Minio, wanted: int, all_of_it: bool = False) -> bytes:
        """Up to `wanted` bytes from the position on, at least one; `all_of_it`: after a cut all of them again."""
        try:
            if self._response is None:
                self._request(client)
            block = bytes(self._response.read(wanted))
            if not block or (all_of_it and len(block) < wanted):
                raise ProtocolError("the stream ended early")
        except BaseException:
            self._drop()
            raise
        return block
