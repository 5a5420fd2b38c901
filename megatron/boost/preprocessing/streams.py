"""Input files as streams of bytes, whatever they are compressed with."""

import gzip
import io
import zlib
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

COMPRESSED_SUFFIXES = (".gz", ".zst")

_SKIPPED_AT_ONCE = 1 << 20


class DamagedInput(ValueError):
    """A compressed file that ends early or is not what its name says; the message is the reason."""


class ByteStream:
    """The content of a file, decompressed by its suffix while it is read; a context manager.

    Memory does not grow with the file, compressed or not. Reading raises `DamagedInput`.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._content: BinaryIO
        match path.suffix.lower():
            case ".gz":
                self._content = gzip.GzipFile(fileobj=self._file)  # type: ignore[assignment]
            case ".zst":
                self._content = io.BufferedReader(_ZstandardFrames(self._file), 1 << 17)
            case _:
                self._content = self._file
        self._compressed = self._content is not self._file

    @property
    def disk_bytes(self) -> int:
        """How much of the file on disk has been taken in, to show progress."""
        return self._file.tell()

    def read(self, size: int) -> bytes:
        """The next `size` bytes of the content, fewer only at its end."""
        try:
            return self._content.read(size)
        except _damages() as error:
            raise DamagedInput(_reason(error)) from error

    def read_line(self, limit: int) -> bytes:
        """The next line with its line break, or its first `limit` bytes."""
        try:
            return self._content.readline(limit)
        except _damages() as error:
            raise DamagedInput(_reason(error)) from error

    def skip(self, size: int) -> None:
        """Leave out the next `size` bytes."""
        if not self._compressed:
            self._file.seek(size, io.SEEK_CUR)
            return
        while size > 0 and (skipped := len(self.read(min(size, _SKIPPED_AT_ONCE)))):
            size -= skipped

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._content.close()
        self._file.close()


class _ZstandardFrames(io.RawIOBase):
    """The content of one frame after the other.

    The library's own reader takes a file that ends in the middle of a frame for a whole one.
    """

    # A byte may stand for 32 KiB, so the input is handed over in small portions.
    _PORTION = 256

    def __init__(self, file: BinaryIO) -> None:
        import zstandard

        self._file = file
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame = self._decompressor.decompressobj()
        self._within_frame = False
        self._input = b""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        view = memoryview(buffer).cast("B")
        while not self._content:
            data = self._input or self._file.read(self._PORTION)
            if not data:
                if self._within_frame:
                    raise EOFError("the file ends in the middle of a frame")
                return 0
            self._content = memoryview(self._frame.decompress(data))
            self._within_frame = not self._frame.eof
            self._input = b""
            if self._frame.eof:
                self._input = self._frame.unused_data
                self._frame = self._decompressor.decompressobj()
        size = min(len(view), len(self._content))
        view[:size] = self._content[:size]
        self._content = self._content[size:]
        return size


def _damages() -> tuple[type[Exception], ...]:
    # Called where an exception is already on its way, so zstandard is there if it was needed.
    try:
        from zstandard import ZstdError
    except ImportError:
        return EOFError, gzip.BadGzipFile, zlib.error
    return EOFError, gzip.BadGzipFile, zlib.error, ZstdError


def _reason(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "the compressed file ends early"
    return f"the compressed file is damaged ({error})"
