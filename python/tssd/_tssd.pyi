from collections.abc import Sequence
from os import PathLike
from types import GenericAlias, TracebackType
from typing import Any, Generic, Literal, TypeVar, final

import torch
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Buffer

from ._reference import TensorReference

_Path = str | PathLike[str]
_Framework = Literal["pt", "torch", "pytorch", "np", "numpy"]
_Backend = Literal["mmap", "pread"]
_Verify = Literal["eager", "lazy", "off"]
_Compression = Literal["zstd", "zstd-plain"]

__all__ = [
    "_kinds",
    "safe_open",
    "SafeSlice",
    "inspect",
    "load",
    "load_file",
    "save",
    "save_file",
    "verify",
    "_Buffer",
    "TensorShard",
    "TensorSlice",
    "TorchStoreStateDict",
    "__version__",
]

__version__: str

def save_file(
    state_dict: dict[Any, Any],
    filename: _Path,
    metadata: dict[str, str | int | bytes] | None = None,
    *,
    compression: _Compression | None = None,
    level: int = 1,
    digest: Literal["blake3"] | None = None,
    fsync: bool = True,
    allow_pickle: bool = False,
) -> None: ...
def save(
    state_dict: dict[Any, Any],
    metadata: dict[str, str | int | bytes] | None = None,
    *,
    compression: _Compression | None = None,
    level: int = 1,
    digest: Literal["blake3"] | None = None,
    allow_pickle: bool = False,
) -> bytes: ...
def load_file(
    filename: _Path,
    device: str | int | torch.device = "cpu",
    *,
    framework: _Framework | None = None,
    backend: _Backend = "mmap",
    verify: _Verify = "eager",
    allow_pickle: bool = False,
) -> dict[Any, Any]: ...
def load(
    data: Buffer,
    device: str | int | torch.device = "cpu",
    *,
    framework: _Framework | None = None,
    verify: _Verify = "eager",
    allow_pickle: bool = False,
) -> dict[Any, Any]: ...
def verify(filename: _Path) -> None: ...
def inspect(filename: _Path) -> dict[str, Any]: ...
def _kinds() -> list[tuple[str, str, str]]: ...
@final
class safe_open:
    def __new__(
        cls,
        filename: _Path,
        framework: _Framework,
        device: str | int | torch.device = "cpu",
        *,
        backend: _Backend = "mmap",
        verify: _Verify = "lazy",
    ) -> safe_open: ...
    def __enter__(self) -> safe_open: ...
    def __exit__(
        self,
        *_exception: type[BaseException] | BaseException | TracebackType | None,
    ) -> None: ...
    def keys(self) -> list[str]: ...
    def offset_keys(self) -> list[str]: ...
    def metadata(self) -> dict[str, str | int | bytes] | None: ...
    def get_tensor(self, name: str) -> Any: ...
    def get_slice(self, name: str) -> SafeSlice: ...

@final
class SafeSlice:
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: Any, /) -> Any: ...

@final
class TensorSlice:
    def __new__(
        cls,
        offsets: Sequence[int],
        coordinates: Sequence[int] | None,
        global_shape: Sequence[int],
        local_shape: Sequence[int],
        mesh_shape: Sequence[int],
    ) -> TensorSlice: ...
    @classmethod
    def from_dtensor(cls, t: torch.Tensor) -> TensorSlice: ...
    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def coordinates(self) -> tuple[int, ...] | None: ...
    @property
    def global_shape(self) -> tuple[int, ...]: ...
    @property
    def local_shape(self) -> tuple[int, ...]: ...
    @property
    def mesh_shape(self) -> tuple[int, ...]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __lt__(self, other: object, /) -> bool: ...
    def __le__(self, other: object, /) -> bool: ...
    def __gt__(self, other: object, /) -> bool: ...
    def __ge__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs__(
        self,
    ) -> tuple[list[int], list[int] | None, list[int], list[int], list[int]]: ...

_Local = TypeVar("_Local")

@final
class TensorShard(Generic[_Local]):
    def __new__(
        cls, local: _Local, tensor_slice: TensorSlice | Sequence[TensorSlice]
    ) -> TensorShard[_Local]: ...
    @property
    def local(self) -> _Local: ...
    @property
    def tensor_slice(self) -> TensorSlice | list[TensorSlice]: ...
    def __getnewargs__(self) -> tuple[_Local, TensorSlice | list[TensorSlice]]: ...
    def __class_getitem__(cls, key: Any) -> GenericAlias: ...

@final
class TorchStoreStateDict:
    @classmethod
    def from_state_dict(
        cls, state_dict: dict[Any, Any], *, allow_pickle: bool = False
    ) -> TorchStoreStateDict: ...
    @classmethod
    def from_bytes(cls, data: Buffer) -> TorchStoreStateDict: ...
    def to_state_dict(
        self, device_mesh: DeviceMesh | None = None, *, allow_pickle: bool = False
    ) -> dict[Any, Any]: ...
    @property
    def flattened_state_dict(self) -> dict[str, TensorReference | list[TensorReference] | Any]: ...
    @property
    def tensor_blob(self) -> Any: ...
    @property
    def nbytes(self) -> int: ...
    def to_bytes(self) -> bytes: ...
    def __reduce__(self) -> tuple[Any, tuple[bytes]]: ...

@final
class _Buffer:
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
