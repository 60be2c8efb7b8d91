from collections.abc import Callable, ItemsView, Iterator, Sequence, ValuesView
from os import PathLike
from types import GenericAlias, TracebackType
from typing import Any, Generic, Literal, TypedDict, TypeVar, final, overload, type_check_only

import numpy as np
import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Buffer, Unpack

from ._options import PutOptions
from ._reference import TensorReference
from ._reports import CommitReport, GetReport, PutReport, ReceiveReport, SaveReport, VersionInfo
from ._targets import Targets
from .mapping import Mapping

_Path = str | PathLike[str]
_Result = TypeVar("_Result")
_Framework = Literal["pt", "torch", "pytorch", "np", "numpy"]
_Backend = Literal["mmap", "pread"]
_Verify = Literal["eager", "lazy", "off"]
_Compression = Literal["none", "auto", "planes", "tiers", "zstd", "zstd-plain"]

__all__ = [
    "OpenVersion",
    "PendingPut",
    "Pin",
    "Publisher",
    "Receiver",
    "SafeSlice",
    "StagedVersion",
    "Store",
    "Subscription",
    "TensorShard",
    "TensorSlice",
    "TorchStoreStateDict",
    "VersionSlice",
    "_Buffer",
    "_Cancel",
    "_Items",
    "_abridge",
    "_abridge_name",
    "_check_cancelled",
    "_delta_apply",
    "_delta_fold",
    "_delta_make",
    "__version__",
    "_kinds",
    "inspect",
    "load",
    "load_file",
    "safe_open",
    "save",
    "save_file",
    "verify",
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
) -> SaveReport: ...
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
def _delta_apply(
    base: _Path, delta: _Path, filename: _Path | None, compression: str | None, fsync: bool
) -> bytes | None: ...
def _delta_fold(deltas: list[_Path], filename: _Path, fsync: bool) -> int: ...
def _delta_make(
    base: _Path, result: _Path, filename: _Path, classes: str, fsync: bool
) -> tuple[int, int, int]: ...
def verify(filename: _Path) -> None: ...
def inspect(filename: _Path) -> dict[str, Any]: ...
def _kinds() -> list[tuple[str, str, str]]: ...
def _abridge(message: str) -> str: ...
def _abridge_name(name: str) -> str: ...
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
    def files(self) -> dict[str, bytes]: ...
    def items(self) -> ItemsView[str, Any]: ...
    def values(self) -> ValuesView[Any]: ...
    def get(self, name: object, default: Any = None) -> Any: ...
    def get_tensor(self, name: str) -> Any: ...
    def get_tensors(self) -> dict[str, Any]: ...
    def get_slice(self, name: str) -> SafeSlice: ...
    def _fingerprint(self) -> bytes: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[str]: ...
    def __contains__(self, name: object, /) -> bool: ...
    def __getitem__(self, name: object, /) -> Any: ...
    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]: ...

@final
class SafeSlice:
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: Any, /) -> Any: ...
    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]: ...

@final
class TensorSlice:
    def __new__(
        cls,
        offsets: Sequence[int],
        coordinates: Sequence[int] | None,
        global_shape: Sequence[int],
        local_shape: Sequence[int],
        mesh_shape: Sequence[int] | None,
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
        cls, local: _Local, tensor_slice: TensorSlice | Sequence[TensorSlice], primary: bool = True
    ) -> TensorShard[_Local]: ...
    @classmethod
    def from_megatron(cls, sharded_tensor: Any) -> TensorShard[Any]: ...
    @property
    def local(self) -> _Local: ...
    @property
    def tensor_slice(self) -> TensorSlice | list[TensorSlice]: ...
    @property
    def primary(self) -> bool: ...
    def __getnewargs__(self) -> tuple[_Local, TensorSlice | list[TensorSlice], bool]: ...
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

@final
class _Cancel:
    def __new__(cls) -> _Cancel: ...
    def cancel(self) -> None: ...
    def run(self, call: Callable[[], _Result]) -> _Result: ...

def _check_cancelled() -> None: ...

_StateDict = dict[Any, Any] | TorchStoreStateDict
_FloatingDtype = torch.dtype | np.dtype[Any] | type[np.generic] | str
_Durability = Literal["memory", "disk", "object"]
_Transport = Literal["cuda_ipc", "file", "memory", "object", "shared_memory", "tcp", "tls"]
_Metadata = dict[str, Any]
_Into = TypeVar("_Into")
_IntoDict = TypeVar("_IntoDict", bound=dict[Any, Any] | Targets)

# The keywords of `Store.put_state_dict`, except `wait`.
@type_check_only
class _PutKeywords(TypedDict, total=False):
    version: int | None
    writers: int | Sequence[int] | ProcessGroup | None
    writer: int | None
    job: str | None
    durability: _Durability
    metadata: _Metadata | None
    transfer_dtype: _FloatingDtype | None
    allow_pickle: bool
    timeout: float | None
    options: PutOptions | None
    mapping: Mapping | None

@final
class StagedVersion:
    @property
    def key(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def id(self) -> str: ...
    @property
    def report(self) -> GetReport: ...
    def commit(self, timeout: float | None = None) -> CommitReport: ...
    def close(self) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    def __enter__(self) -> StagedVersion: ...
    def __exit__(self, *_error: object) -> None: ...

@final
class Store:
    def __new__(
        cls,
        url: str | None = None,
        *,
        ca: str | None = None,
        cert: str | None = None,
        key_file: str | None = None,
        connect_timeout: float = 30.0,
    ) -> Store: ...
    @staticmethod
    def _connect_lazily(
        url: str | None,
        ca: str | None,
        cert: str | None,
        key_file: str | None,
        connect_timeout: float,
    ) -> Store: ...
    @property
    def url(self) -> str: ...
    @overload
    def put_state_dict(
        self,
        state_dict: _StateDict,
        key: str,
        *,
        version: int | None = None,
        writers: int | Sequence[int] | ProcessGroup | None = None,
        writer: int | None = None,
        job: str | None = None,
        durability: _Durability = "memory",
        wait: Literal[True] = True,
        metadata: _Metadata | None = None,
        transfer_dtype: _FloatingDtype | None = None,
        allow_pickle: bool = False,
        timeout: float | None = None,
        options: PutOptions | None = None,
        mapping: Mapping | None = None,
    ) -> PutReport: ...
    @overload
    def put_state_dict(
        self,
        state_dict: _StateDict,
        key: str,
        *,
        version: int | None = None,
        writers: int | Sequence[int] | ProcessGroup | None = None,
        writer: int | None = None,
        job: str | None = None,
        durability: _Durability = "memory",
        wait: Literal[False],
        metadata: _Metadata | None = None,
        transfer_dtype: _FloatingDtype | None = None,
        allow_pickle: bool = False,
        timeout: float | None = None,
        options: PutOptions | None = None,
        mapping: Mapping | None = None,
    ) -> PendingPut: ...
    @overload
    def put_state_dict(
        self,
        state_dict: _StateDict,
        key: str,
        *,
        version: int | None = None,
        writers: int | Sequence[int] | ProcessGroup | None = None,
        writer: int | None = None,
        job: str | None = None,
        durability: _Durability = "memory",
        wait: bool,
        metadata: _Metadata | None = None,
        transfer_dtype: _FloatingDtype | None = None,
        allow_pickle: bool = False,
        timeout: float | None = None,
        options: PutOptions | None = None,
        mapping: Mapping | None = None,
    ) -> PutReport | PendingPut: ...
    @overload
    def get_state_dict(
        self,
        key: str,
        into: None = None,
        *,
        version: int | str | VersionInfo | OpenVersion | None = None,
        writer: int | None = None,
        names: str | Sequence[str] | None = None,
        strict: bool = True,
        cast: bool = False,
        copy: bool = False,
        verify: bool = True,
        require_transport: _Transport | None = None,
        return_report: Literal[False] = False,
        allow_pickle: bool = False,
        timeout: float | None = None,
        mapping: None = None,
    ) -> dict[Any, Any]: ...
    @overload
    def get_state_dict(
        self,
        key: str,
        into: None = None,
        *,
        version: int | str | VersionInfo | OpenVersion | None = None,
        writer: int | None = None,
        names: str | Sequence[str] | None = None,
        strict: bool = True,
        cast: bool = False,
        copy: bool = False,
        verify: bool = True,
        require_transport: _Transport | None = None,
        return_report: Literal[True],
        allow_pickle: bool = False,
        timeout: float | None = None,
        mapping: None = None,
    ) -> tuple[dict[Any, Any], GetReport]: ...
    @overload
    def get_state_dict(
        self,
        key: str,
        into: None = None,
        *,
        version: int | str | VersionInfo | OpenVersion | None = None,
        writer: int | None = None,
        names: str | Sequence[str] | None = None,
        strict: bool = True,
        cast: bool = False,
        copy: bool = False,
        verify: bool = True,
        require_transport: _Transport | None = None,
        return_report: bool,
        allow_pickle: bool = False,
        timeout: float | None = None,
        mapping: None = None,
    ) -> dict[Any, Any] | tuple[dict[Any, Any], GetReport]: ...
    @overload
    def get_state_dict(
        self,
        key: str,
        into: _IntoDict,
        *,
        version: int | str | VersionInfo | OpenVersion | None = None,
        writer: int | None = None,
        names: None = None,
        strict: bool = True,
        cast: bool = False,
        copy: bool = False,
        verify: bool = True,
        require_transport: _Transport | None = None,
        return_report: Literal[False] = False,
        allow_pickle: bool = False,
        timeout: float | None = None,
        mapping: Mapping | None = None,
    ) -> _IntoDict: ...
    @overload
    def get_state_dict(
        self,
        key: str,
        into: _IntoDict,
        *,
        version: int | str | VersionInfo | OpenVersion | None = None,
        writer: int | None = None,
        names: None = None,
        strict: bool = True,
        cast: bool = False,
        copy: bool = False,
        verify: bool = True,
        require_transport: _Transport | None = None,
        return_report: Literal[True],
        allow_pickle: bool = False,
        timeout: float | None = None,
        mapping: Mapping | None = None,
    ) -> tuple[_IntoDict, GetReport]: ...
    @overload
    def get_state_dict(
        self,
        key: str,
        into: _IntoDict,
        *,
        version: int | str | VersionInfo | OpenVersion | None = None,
        writer: int | None = None,
        names: None = None,
        strict: bool = True,
        cast: bool = False,
        copy: bool = False,
        verify: bool = True,
        require_transport: _Transport | None = None,
        return_report: bool,
        allow_pickle: bool = False,
        timeout: float | None = None,
        mapping: Mapping | None = None,
    ) -> _IntoDict | tuple[_IntoDict, GetReport]: ...
    def stage(
        self,
        key: str,
        into: dict[Any, Any] | Targets,
        *,
        version: int | str | VersionInfo | OpenVersion | None = None,
        writer: int | None = None,
        strict: bool = True,
        cast: bool = False,
        verify: bool = True,
        require_transport: _Transport | None = None,
        allow_pickle: bool = False,
        timeout: float | None = None,
        mapping: Mapping | None = None,
    ) -> StagedVersion: ...
    @overload
    def put(
        self, /, key: str, value: object, *, wait: Literal[True] = True, **keywords: Unpack[_PutKeywords]
    ) -> PutReport: ...
    @overload
    def put(
        self, /, key: str, value: object, *, wait: Literal[False], **keywords: Unpack[_PutKeywords]
    ) -> PendingPut: ...
    @overload
    def put(
        self, /, key: str, value: object, *, wait: bool, **keywords: Unpack[_PutKeywords]
    ) -> PutReport | PendingPut: ...
    @overload
    def put_batch(
        self, /, values: dict[str, Any], *, wait: Literal[True] = True, **keywords: Unpack[_PutKeywords]
    ) -> list[PutReport]: ...
    @overload
    def put_batch(
        self, /, values: dict[str, Any], *, wait: Literal[False], **keywords: Unpack[_PutKeywords]
    ) -> list[PendingPut]: ...
    @overload
    def put_batch(
        self, /, values: dict[str, Any], *, wait: bool, **keywords: Unpack[_PutKeywords]
    ) -> list[PutReport] | list[PendingPut]: ...
    def get_batch(
        self,
        /,
        keys: Sequence[str] | dict[str, Any],
        *,
        fqn: str | None = None,
        tensor_slice: TensorSlice | None = None,
        version: int | str | VersionInfo | OpenVersion | None = None,
        writer: int | None = None,
        verify: bool = True,
        require_transport: _Transport | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]: ...
    def delete_batch(self, keys: Sequence[str]) -> int: ...
    @overload
    def get(
        self,
        key: str,
        into: None = None,
        *,
        fqn: str | None = None,
        tensor_slice: TensorSlice | None = None,
        version: int | str | VersionInfo | OpenVersion | None = None,
        writer: int | None = None,
        verify: bool = True,
        require_transport: _Transport | None = None,
        timeout: float | None = None,
    ) -> Any: ...
    @overload
    def get(
        self,
        key: str,
        into: _Into,
        *,
        fqn: str | None = None,
        tensor_slice: TensorSlice | None = None,
        version: int | str | VersionInfo | OpenVersion | None = None,
        writer: int | None = None,
        verify: bool = True,
        require_transport: _Transport | None = None,
        timeout: float | None = None,
    ) -> _Into: ...
    def publish(
        self,
        key: str,
        *,
        version: int | None = None,
        writers: int | Sequence[int] | ProcessGroup | None = None,
        writer: int | None = None,
        job: str | None = None,
        bucket_bytes: int = 536870912,
        durability: _Durability = "memory",
        metadata: _Metadata | None = None,
        transfer_dtype: _FloatingDtype | None = None,
        allow_pickle: bool = False,
        timeout: float | None = None,
        options: PutOptions | None = None,
    ) -> Publisher: ...
    def open(
        self,
        key: str,
        *,
        version: int | str | VersionInfo | OpenVersion | None = None,
        names: str | Sequence[str] | None = None,
        writer: int | None = None,
        verify: bool = True,
        require_transport: _Transport | None = None,
        timeout: float | None = None,
    ) -> OpenVersion: ...
    def subscribe(self, key: str) -> Subscription: ...
    def receiver(
        self,
        key: str,
        into: dict[Any, Any],
        *,
        verify: bool = True,
        require_transport: _Transport | None = None,
    ) -> Receiver: ...
    def keys(self, prefix: str = "") -> list[str]: ...
    def exists(self, key: str, version: int | str | VersionInfo | OpenVersion | None = None) -> bool: ...
    def versions(self, key: str) -> list[VersionInfo]: ...
    def head(self, key: str) -> VersionInfo | None: ...
    def delete(self, key: str, version: int | str | VersionInfo | OpenVersion | None = None) -> int: ...
    def retain(self, key: str, keep: int) -> None: ...
    def wait_for_version(
        self,
        key: str,
        version: int = 0,
        timeout: float | None = None,
        *,
        after: Literal["now"] | OpenVersion | VersionInfo | PutReport | tuple[int, int] | None = None,
        run: str | None = None,
    ) -> OpenVersion: ...
    def pin(self, key: str, label: str, version: int | str | VersionInfo | OpenVersion | None = None) -> Pin: ...
    def rollback(self, key: str, to: int | str | VersionInfo | OpenVersion) -> VersionInfo: ...
    def unpin(self, key: str, label: str) -> None: ...
    def pins(self, key: str) -> dict[str, int]: ...
    def prefetch(
        self,
        key: str,
        *,
        version: int | str | VersionInfo | OpenVersion | None = None,
        timeout: float | None = None,
    ) -> int: ...
    def close(self) -> None: ...
    def __enter__(self) -> Store: ...
    def __exit__(
        self, *_error: type[BaseException] | BaseException | TracebackType | None
    ) -> None: ...
    def __reduce__(self) -> tuple[Any, tuple[Any]]: ...

@final
class PendingPut:
    def wait_visible(self, timeout: float | None = None) -> int: ...
    def result(self, timeout: float | None = None) -> PutReport: ...

@final
class Publisher:
    def put(self, name: str, value: object) -> None: ...
    def flush(self) -> None: ...
    @property
    def report(self) -> PutReport | None: ...
    def __enter__(self) -> Publisher: ...
    def __exit__(
        self,
        error: type[BaseException] | None = None,
        *_rest: BaseException | TracebackType | None,
    ) -> None: ...

@final
class OpenVersion:
    @property
    def key(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def id(self) -> str: ...
    def keys(self) -> list[str]: ...
    def items(self) -> _Items: ...
    def values(self) -> ValuesView[Any]: ...
    def get(self, name: object, default: Any = None) -> Any: ...
    def get_tensor(self, name: str, tensor_slice: TensorSlice | None = None) -> Any: ...
    def get_slice(self, name: str) -> VersionSlice: ...
    def to_meta(self) -> dict[Any, Any]: ...
    def metadata(self) -> _Metadata | None: ...
    def close(self) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[str]: ...
    def __contains__(self, name: object, /) -> bool: ...
    def __getitem__(self, name: object, /) -> Any: ...
    def __enter__(self) -> OpenVersion: ...
    def __exit__(
        self, *_error: type[BaseException] | BaseException | TracebackType | None
    ) -> None: ...

@final
class VersionSlice:
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: Any, /) -> Any: ...

@final
class Pin:
    @property
    def version(self) -> int: ...
    @property
    def label(self) -> str: ...
    def unpin(self) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    def __enter__(self) -> Pin: ...
    def __exit__(
        self, *_error: type[BaseException] | BaseException | TracebackType | None
    ) -> None: ...

@final
class _Items:
    def __iter__(self) -> _Items: ...
    def __next__(self) -> tuple[str, Any]: ...

@final
class Subscription:
    def __iter__(self) -> Subscription: ...
    def __next__(self) -> VersionInfo: ...
    def close(self) -> None: ...

@final
class Receiver:
    def receive(self, timeout: float | None = None) -> ReceiveReport: ...
    def close(self) -> None: ...
    def __enter__(self) -> Receiver: ...
    def __exit__(
        self, *_error: type[BaseException] | BaseException | TracebackType | None
    ) -> None: ...
