"""Arrays in GPU memory with DLPack, on the CUDA driver of NVIDIA or on the fake driver of the tests."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

HOST, CUDA = 1, 2
TYPES = {"int8": (0, 8), "int64": (0, 64), "uint8": (1, 8), "float16": (2, 16), "float32": (2, 32), "bfloat16": (4, 16)}

_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _ManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


class _ManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


def load_library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        # The name of the fake driver.
        return ctypes.CDLL("libcuda.so")


class Driver:
    """The CUDA driver library, with a current context and a stream."""

    def __init__(self) -> None:
        self.library = load_library()
        self.call("cuInit", 0)
        self.context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.call("cuCtxSetCurrent", self.context)
        self.stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(self.stream), 1)

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        assert status == 0, f"{name}: {status}"

    def allocate(self, size: int) -> int:
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(size, 1)))
        return pointer.value

    def write(self, pointer: int, data: bytes) -> bytes:
        """Enqueues a copy to the device. Returns the data, which must live until the stream has copied it."""
        source, size = ctypes.c_char_p(data), ctypes.c_size_t(len(data))
        self.call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(pointer), source, size, self.stream)
        return data

    def read(self, pointer: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        arguments = (data, ctypes.c_uint64(pointer), ctypes.c_size_t(size), self.stream)
        self.call("cuMemcpyDtoHAsync_v2", *arguments)
        self.wait()
        return data.raw

    def wait(self) -> None:
        self.call("cuStreamSynchronize", self.stream)

    def make_stream_wait(self, other: int) -> None:
        """Makes another stream, by its number in the array API, wait for the current work of this one."""
        event = ctypes.c_void_p()
        # The current context belongs to a thread, and any thread may call this.
        self.call("cuCtxSetCurrent", self.context)
        self.call("cuEventCreate", ctypes.byref(event), 2)
        self.call("cuEventRecord", event, self.stream)
        assert other == 1, "the default stream"
        self.call("cuStreamWaitEvent", None, event, 0)
        self.call("cuEventDestroy_v2", event)


# Exported tensors by address, until the consumer calls the deleter.
exported: dict[int, Any] = {}


@_Deleter
def _release(address: int) -> None:
    del exported[address]


class Array:
    """An array in GPU or host memory that DLPack exports."""

    def __init__(
        self,
        driver: Driver | None,
        values: Any,
        dtype: str | None = None,
        *,
        strides: tuple[int, ...] | None = None,
        lanes: int = 1,
        version: int | None = 1,
        is_writable: bool = True,
    ) -> None:
        values = np.asarray(values)
        self.driver, self.version, self.is_writable, self.lanes = driver, version, is_writable, lanes
        self.kind = HOST if driver is None else CUDA
        self.dtype, self.shape, self.strides = dtype or str(values.dtype), values.shape, strides
        self.size = values.nbytes
        if driver is None:
            self.host = values.copy()
            self.pointer = self.host.ctypes.data
        else:
            self.pointer = driver.allocate(self.size)
            self.write(values)

    def write(self, values: Any) -> None:
        assert self.driver is not None
        self._source = self.driver.write(self.pointer, np.ascontiguousarray(values).tobytes())

    def read(self) -> bytes:
        return self.host.tobytes() if self.driver is None else self.driver.read(self.pointer, self.size)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        if self.version is None and options:
            raise TypeError("max_version came later")
        if self.driver is not None:
            assert stream is not None
            self.driver.make_stream_wait(stream)
        ndim = len(self.shape)
        dims = ctypes.c_int64 * ndim
        shape, strides = dims(*self.shape), dims(*self.strides) if self.strides else None
        code, bits = TYPES[self.dtype]
        tensor = _Tensor(self.pointer, self.kind, 0, ndim, code, bits, self.lanes, shape, strides, 0)
        name = b"dltensor" if self.version is None else b"dltensor_versioned"
        managed: Any = _ManagedTensor(tensor, None, _release)
        if self.version is not None:
            managed = _ManagedTensorVersioned(self.version, 0, None, _release, int(not self.is_writable), tensor)
        address = ctypes.addressof(managed)
        exported[address] = (self, managed, shape, strides, name)
        return _capsule(address, name, None)
