"""Sizes of a Parquet file's pages, from their headers: a page is decoded as a whole, whatever Arrow is asked for.

So the largest page tells what memory a reader needs, and how many rows it may take at a time. Headers are Thrift
structures in the compact protocol; read here is what their sizes and their ends need, and left out is all else.

Source of the layout: apache/parquet-format, parquet.thrift; apache/thrift, doc/specs/thrift-compact-protocol.md.
"""

from typing import BinaryIO

_UNCOMPRESSED, _COMPRESSED = 2, 3
"""Fields of a page header: bytes of the page as it is decoded, and as it lies behind the header."""

_TRUE, _FALSE, _BYTE, _I16, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12
_DEEPEST = 16


def largest_page(stream: BinaryIO, begin: int, end: int) -> int:
    """Bytes of the largest page, uncompressed, of a column chunk.

    Args:
        stream: The file.
        begin: Where the chunk's first page begins, its dictionary's or its data's.
        end: Where the chunk ends.

    Raises:
        ValueError: there is no page header where one should be.
    """
    largest = 0
    while begin < end:
        stream.seek(begin)
        sizes = _integers(stream, 0)
        try:
            uncompressed, compressed = sizes[_UNCOMPRESSED], sizes[_COMPRESSED]
        except KeyError:
            raise ValueError(f"no page header at byte {begin}") from None
        if min(uncompressed, compressed) < 0:
            raise ValueError(f"a page of negative size at byte {begin}")
        largest = max(largest, uncompressed)
        begin = stream.tell() + compressed
    return largest


def _integers(stream: BinaryIO, depth: int) -> dict[int, int]:
    """The integer fields of the structure that begins here, which is read to its end."""
    if depth > _DEEPEST:
        raise ValueError(f"damaged page header at byte {stream.tell()}")
    found: dict[int, int] = {}
    number = 0
    while head := _byte(stream):
        delta, kind = head >> 4, head & 15
        number = number + delta if delta else _integer(stream)
        if _I16 <= kind <= _I64:
            found[number] = _integer(stream)
        elif kind not in (_TRUE, _FALSE):  # a flag's value is its type
            _skip(stream, kind, depth)
    return found


def _skip(stream: BinaryIO, kind: int, depth: int) -> None:
    """Pass over a value."""
    if kind in (_TRUE, _FALSE, _BYTE):
        _byte(stream)
    elif _I16 <= kind <= _I64:
        _varint(stream)
    elif kind == _DOUBLE:
        stream.seek(8, 1)
    elif kind == _BINARY:
        stream.seek(_varint(stream), 1)
    elif kind in (_LIST, _SET):
        head = _byte(stream)
        for _ in range(_varint(stream) if head >> 4 == 15 else head >> 4):
            _skip(stream, head & 15, depth + 1)
    elif kind == _MAP:
        if size := _varint(stream):
            kinds = _byte(stream)
            for _ in range(size):
                _skip(stream, kinds >> 4, depth + 1)
                _skip(stream, kinds & 15, depth + 1)
    elif kind == _STRUCT:
        _integers(stream, depth + 1)
    else:
        raise ValueError(f"damaged page header at byte {stream.tell()}")


def _integer(stream: BinaryIO) -> int:
    """A signed integer, in zigzag order."""
    value = _varint(stream)
    return (value >> 1) ^ -(value & 1)


def _varint(stream: BinaryIO) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = _byte(stream)
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise ValueError(f"damaged page header at byte {stream.tell()}")


def _byte(stream: BinaryIO) -> int:
    data = stream.read(1)
    if not data:
        raise ValueError("the file ends within a page header")
    return data[0]
