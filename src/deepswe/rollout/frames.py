"""Files of compressed records that only grow, and in which each record is found by its place.

A file is a Zstandard stream, one frame a record with a checksum of its own; `zstd -d` reads it. Before each record
stands a skippable frame with the length of what follows, so that a reader can leave it out; a finished file ends with a
skippable frame that holds the index of its records.

    [skippable: 4 bytes, length][frame] [skippable: 4 bytes, length][frame] ... [skippable: index]

What a killed writer left behind is whole records and at most one that is torn, at the end.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import zstandard

from deepswe.errors import StoreError
from deepswe.regular import open_regular

LEVEL = 3
"""Of compression: 5 saves 2% and takes twice the time, 7 saves 5% and takes three times as long."""
_RECORD, _INDEX = 0x184D2A50, 0x184D2A51
_BLOCK = zstandard.COMPRESSOBJ_FLUSH_BLOCK
_HEAD, _END = struct.Struct("<III"), struct.Struct("<II")

Context = zstandard.ZstdDecompressor
"""What decompresses, of one thread. It serves many records, since making one takes as long as a tenth of a record."""

Entry = tuple[str, int, int]
"""What a record is found by, a task's id and the number of the attempt, and where it begins."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A whole record in a file.

    Attributes:
        offset: of its first byte.
        data: its bytes, length and all.
    """

    offset: int
    data: bytes


class _Kept(threading.local):
    """To make a compressor takes half as long as to use it, and no two threads may use one."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)


_kept = _Kept()


def compress(*parts: bytes) -> bytes:
    """A record as it stands in a file. Each part gets blocks of its own, and so codes that suit it."""
    stream = _kept.compressor.compressobj(size=sum(map(len, parts)))
    pieces = [piece for part in parts for piece in (stream.compress(part), stream.flush(_BLOCK))]
    body = b"".join((*pieces, stream.flush()))
    return _HEAD.pack(_RECORD, 4, len(body)) + body


def decompress(frame: bytes, context: Context) -> bytes:
    """The inverse.

    Raises:
        StoreError: the bytes are damaged.
    """
    try:
        return context.decompress(frame[_HEAD.size :])
    except (zstandard.ZstdError, MemoryError) as error:
        raise StoreError(f"a record is damaged: {error}") from error


def index_frame(entries: Sequence[Entry]) -> bytes:
    """What a finished file ends with."""
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    body = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(text)
    return _END.pack(_INDEX, len(body) + _END.size) + body + _END.pack(len(body), _INDEX)


def read_index(file: BinaryIO) -> tuple[Entry, ...]:
    """The entries of all records of a finished file, in its order.

    Raises:
        StoreError: the file has no index.
    """
    try:
        end = file.seek(-_END.size, os.SEEK_END)
        size, magic = _END.unpack(file.read(_END.size))
        if magic != _INDEX or not 0 < size <= end:
            raise ValueError("it does not end with one")
        file.seek(end - size)
        rows = json.loads(zstandard.ZstdDecompressor().decompress(file.read(size)))
        return tuple((str(name), int(attempt), int(offset)) for name, attempt, offset in rows)
    except (OSError, ValueError, TypeError, MemoryError, zstandard.ZstdError) as error:
        raise StoreError(f"the index cannot be read: {error}") from error


def read_at(file: BinaryIO, offset: int) -> bytes:
    """The frame at a place.

    Raises:
        StoreError: none begins there.
    """
    file.seek(offset)
    head = file.read(_HEAD.size)
    magic, four, length = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0, 0)
    body = file.read(length) if (magic, four) == (_RECORD, 4) else b""
    if not body or len(body) < length:
        raise StoreError(f"no whole record begins at byte {offset}")
    return head + body


def read_frames(file: BinaryIO, offset: int = 0) -> Iterator[Frame]:
    """Every whole record from `offset` on; a torn one at the end of the file is none.

    Raises:
        StoreError: something that is no record stands between them.
    """
    file.seek(offset)
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        magic, four, length = _HEAD.unpack(head)
        if magic == _INDEX:
            return
        if (magic, four) != (_RECORD, 4):
            raise StoreError(f"no record begins at byte {offset}")
        body = file.read(length)
        if len(body) < length:
            return
        yield Frame(offset, head + body)
        offset += len(head) + length


def count_frames(path: Path, offset: int = 0) -> tuple[int, int]:
    """Whole records from `offset` on, and where the next one will begin; nothing is decompressed.

    Raises:
        OSError: the file cannot be read.
        StoreError: as `read_frames`.
    """
    count = 0
    with open_regular(path) as file:
        for frame in read_frames(file, offset):
            count, offset = count + 1, frame.offset + len(frame.data)
    return count, offset


def whole_size(frames: Sequence[Frame]) -> int:
    """Bytes up to the end of the last of the frames of a file."""
    return frames[-1].offset + len(frames[-1].data) if frames else 0
