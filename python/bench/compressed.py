"""A peer for compressed files: the bytes of safetensors, compressed by one call to libzstd."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
from formats import Format
from model import State

LEVEL = 1


class Zstd:
    """The libzstd of the system."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        for name in ("ZSTD_compressBound", "ZSTD_compress", "ZSTD_getFrameContentSize", "ZSTD_decompress"):
            getattr(self.library, name).restype = ctypes.c_size_t

    def compress(self, raw: bytes) -> memoryview:
        size = ctypes.c_size_t(len(raw))
        target = allocate(self.library.ZSTD_compressBound(size))
        length = self.library.ZSTD_compress(target, ctypes.c_size_t(len(target)), raw, size, ctypes.c_int(LEVEL))
        return memoryview(target)[:length]

    def decompress(self, compressed: bytes) -> bytes:
        size = ctypes.c_size_t(len(compressed))
        target = allocate(self.library.ZSTD_getFrameContentSize(compressed, size))
        length = self.library.ZSTD_decompress(target, ctypes.c_size_t(len(target)), compressed, size)
        if length != len(target):
            raise AssertionError("libzstd refuses what it has made")
        return target


def allocate(size: int) -> bytes:
    """Allocates `bytes` of this size without clearing them, as a binding in C would do."""
    constructor = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)
    buffer: bytes = constructor(("PyBytes_FromStringAndSize", ctypes.pythonapi))(None, size)
    return buffer


def formats() -> Iterator[Format]:
    """Yields the format. Yields nothing if the system has no libzstd."""
    path = ctypes.util.find_library("zstd")
    if path is None:
        return
    zstd = Zstd(path)

    def save(state: State, path: Path) -> None:
        path.write_bytes(zstd.compress(safetensors.torch.save(state)))

    def load(path: Path, _: State) -> State:
        return safetensors.torch.load(zstd.decompress(path.read_bytes()))

    yield Format("safetensors in zstd", "peer", save, load)
