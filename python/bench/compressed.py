"""What one does who wants a compressed file and has no TSSD: the bytes of safetensors through libzstd, in one call."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
from formats import Format
from model import State

LEVEL = 1


class Library:
    """That of the system."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        for name in ("ZSTD_compressBound", "ZSTD_compress", "ZSTD_getFrameContentSize", "ZSTD_decompress"):
            getattr(self.library, name).restype = ctypes.c_size_t

    def compress(self, raw: bytes) -> memoryview:
        size = ctypes.c_size_t(len(raw))
        room = new(self.library.ZSTD_compressBound(size))
        count = self.library.ZSTD_compress(room, ctypes.c_size_t(len(room)), raw, size, ctypes.c_int(LEVEL))
        return memoryview(room)[:count]

    def decompress(self, compressed: bytes) -> bytes:
        size = ctypes.c_size_t(len(compressed))
        room = new(self.library.ZSTD_getFrameContentSize(compressed, size))
        count = self.library.ZSTD_decompress(room, ctypes.c_size_t(len(room)), compressed, size)
        if count != len(room):
            raise AssertionError("libzstd refuses what it has made")
        return room


def new(size: int) -> bytes:
    """So many bytes that nobody clears before they are filled, as a binding of C would do it."""
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)
    made: bytes = make(("PyBytes_FromStringAndSize", ctypes.pythonapi))(None, size)
    return made


def formats() -> Iterator[Format]:
    """None where the system has no libzstd."""
    path = ctypes.util.find_library("zstd")
    if path is None:
        return
    library = Library(path)

    def save(state: State, path: Path) -> None:
        path.write_bytes(library.compress(safetensors.torch.save(state)))

    def load(path: Path, _: State) -> State:
        return safetensors.torch.load(library.decompress(path.read_bytes()))

    yield Format("safetensors in zstd", "peer", save, load)
