"""Reading one S3 object as a file: ranged, seekable, and taken up where it broke when the connection is cut.

Repeating, renewing credentials and naming errors is the connection's part; here is only what a stream adds:
the position, and the version that was opened, so that two versions of an object are never mixed.
"""

import io
import os
from collections.abc import Callable
from typing import Any

from minio import Minio
from minio.error import S3Error
from urllib3.exceptions import ProtocolError

RECEIVED_BYTES = 1 << 20
"""Bytes taken from the connection at a time: what is received again, at most, after a cut."""


WHOLE_BYTES = 4 << 20
"""Bytes that are taken at once where all of a stream is wanted."""


class ObjectStream(io.RawIOBase):
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
        self._bucket, self._name, self._uri, self._call = bucket, name, uri, call
        self._offset, self._position = offset, 0
        self._wanted = length
        self._response: Any = None
        self.etag = etag
        """Version that is read; a later one is an error, never mixed in."""
        self.total = 0
        """Size of the whole object in bytes."""
        call(self._request)

    @property
    def size(self) -> int:
        """Bytes in the stream."""
        left = max(self.total - self._offset, 0)
        return left if self._wanted is None else min(self._wanted, left)

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
            self._drop()
            self._position = target
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: min(max(self.size - self._position, 0), RECEIVED_BYTES)]
        if not view:
            return 0
        count: int = self._call(lambda client: self._receive(client, view))
        self._position += count
        return count

    def readall(self) -> bytes:
        left = self.size - self._position
        if 0 < left <= WHOLE_BYTES:
            whole: bytes = self._call(lambda client: self._receive_whole(client, left))
            self._position += left
            return whole
        data = bytearray(max(self.size - self._position, 0))
        view, filled = memoryview(data), 0
        while filled < len(data):
            filled += self.readinto(view[filled:])
        return bytes(data)

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

    def _receive_whole(self, client: Minio, left: int) -> bytes:
        """All that is left, without a copy; after a cut all of it again."""
        try:
            if self._response is None:
                self._request(client)
            data = bytes(self._response.read())
            if len(data) != left:
                raise ProtocolError("the stream ended early")
        except BaseException:
            self._drop()
            raise
        return data

    def _receive(self, client: Minio, view: memoryview) -> int:
        try:
            if self._response is None:
                self._request(client)
            count = int(self._response.readinto(view))
            if count == 0:
                raise ProtocolError("the stream ended early")
        except BaseException:
            self._drop()
            raise
        return count
