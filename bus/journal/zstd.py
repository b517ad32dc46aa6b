"""zstd: the library `zstandard` where it is installed; for reading alone, the system's libzstd will do.

So a journal can be shown and a rank replayed on a machine that has hardly anything installed.
"""

import ctypes
import ctypes.util
from collections.abc import Callable
from functools import cache

LEVEL = -1
"""A fifth less of the processor's time than level 1, and files that are a quarter larger."""


class ZstdError(Exception):
    """Data that cannot be decompressed, or no library to do it with; the text says which."""


def compressor() -> Callable[[bytes], bytes]:
    """A function that compresses, for one thread.

    Raises:
        ZstdError: `zstandard` is not installed.
    """
    try:
        import zstandard
    except ImportError:
        raise ZstdError("a journal is written with the package zstandard, which is not installed") from None
    return zstandard.ZstdCompressor(level=LEVEL).compress


def decompress(data: bytes, size: int) -> bytes:
    """The `size` bytes that were compressed to `data`.

    Raises:
        ZstdError: the data is damaged, or there is no library.
    """
    raw = _decompressor()(data, size)
    if len(raw) != size:
        raise ZstdError(f"it gives {len(raw)} bytes instead of {size}")
    return raw


@cache
def _decompressor() -> Callable[[bytes, int], bytes]:
    try:
        return _of_package()
    except ImportError:
        return of_system()


def _of_package() -> Callable[[bytes, int], bytes]:
    import zstandard

    one = zstandard.ZstdDecompressor()

    def decompress(data: bytes, size: int) -> bytes:
        try:
            if zstandard.frame_content_size(data) != size:  # it is what decompress allocates
                raise ZstdError("its size is damaged")
            return one.decompress(data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ZstdError(str(error)) from None

    return decompress


def of_system() -> Callable[[bytes, int], bytes]:
    """Decompression by the system's libzstd (RFC 8878 has the format, zstd.h the interface).

    Raises:
        ZstdError: there is none.
    """
    name = ctypes.util.find_library("zstd")
    if name is None:
        raise ZstdError("reading a journal takes the package zstandard or the system library libzstd; both are missing")
    library = ctypes.CDLL(name)
    library.ZSTD_decompress.restype = ctypes.c_size_t
    library.ZSTD_decompress.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    library.ZSTD_isError.argtypes = [ctypes.c_size_t]
    library.ZSTD_getErrorName.restype = ctypes.c_char_p
    library.ZSTD_getErrorName.argtypes = [ctypes.c_size_t]

    def decompress(data: bytes, size: int) -> bytes:
        target = ctypes.create_string_buffer(size)
        result = library.ZSTD_decompress(target, size, data, len(data))
        if library.ZSTD_isError(result):
            raise ZstdError(library.ZSTD_getErrorName(result).decode())
        return target.raw[:result]

    return decompress
