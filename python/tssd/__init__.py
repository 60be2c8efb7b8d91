"""TSSD: lossless, checksummed, zero-copy files for PyTorch state dicts, and a store for them.

    import tssd
    tssd.save_file({"model": model.state_dict(), "step": 3}, "checkpoint.tssd")
    checkpoint = tssd.load_file("checkpoint.tssd")

torch and numpy are imported only when they are needed.
"""

from ._classes import register_context, register_torchao, register_wrapper
from ._errors import (
    TssdCorruptError,
    TssdConnectionError,
    TssdError,
    TssdFileExistsError,
    TssdFileNotFoundError,
    TssdIsADirectoryError,
    TssdKeyError,
    TssdMemoryError,
    TssdNotADirectoryError,
    TssdOSError,
    TssdPermissionError,
    TssdTimeoutError,
    TssdTypeError,
    TssdUnsupportedError,
    TssdValueError,
)
from ._options import PutOptions
from ._reference import TensorReference
from ._reports import CommitReport, DeviceCopies, GetReport, PutReport, ReceiveReport, SaveReport, VersionInfo
from ._ring import Ring
from ._sync import SyncRecord, on_sync
from ._targets import Targets
from ._tssd import (
    OpenVersion,
    PendingPut,
    Pin,
    Publisher,
    Receiver,
    SafeSlice,
    StagedVersion,
    Store,
    Subscription,
    TensorShard,
    TensorSlice,
    TorchStoreStateDict,
    VersionSlice,
    __version__,
    inspect,
    load,
    load_file,
    safe_open,
    save,
    save_file,
    verify,
)

__all__ = [
    "CommitReport",
    "DeviceCopies",
    "GetReport",
    "OpenVersion",
    "PendingPut",
    "Pin",
    "Publisher",
    "PutOptions",
    "PutReport",
    "ReceiveReport",
    "Receiver",
    "Ring",
    "SafeSlice",
    "SaveReport",
    "StagedVersion",
    "Store",
    "Subscription",
    "SyncRecord",
    "Targets",
    "TensorReference",
    "TensorShard",
    "TensorSlice",
    "TorchStoreStateDict",
    "TssdConnectionError",
    "TssdCorruptError",
    "TssdError",
    "TssdFileExistsError",
    "TssdFileNotFoundError",
    "TssdIsADirectoryError",
    "TssdKeyError",
    "TssdMemoryError",
    "TssdNotADirectoryError",
    "TssdOSError",
    "TssdPermissionError",
    "TssdTimeoutError",
    "TssdTypeError",
    "TssdUnsupportedError",
    "TssdValueError",
    "VersionInfo",
    "VersionSlice",
    "__version__",
    "inspect",
    "load",
    "load_file",
    "on_sync",
    "register_context",
    "register_torchao",
    "register_wrapper",
    "safe_open",
    "save",
    "save_file",
    "verify",
]
