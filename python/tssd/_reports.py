"""Reports of puts, gets and receives, and descriptions of versions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class DeviceCopies:
    """How bytes were copied from or to GPUs and other devices.

    Attributes:
        pinned: bytes copied directly from or to page-locked memory, at the speed of the bus.
        pageable: bytes that took an additional copy, through pageable memory.
        device: bytes copied within the memory of a GPU.
        pageable_reason: the reason for the last additional copy; None if there was none.
    """

    pinned: int
    pageable: int
    device: int
    pageable_reason: str | None


@dataclass(frozen=True)
class SaveReport:
    """The report of `save_file`.

    Attributes:
        bytes: the length of the file, in bytes.
        stored_as_base: the values whose class is a subclass of a builtin class, such as an `IntEnum`. They are stored
            as an object of the builtin class. The dict has the name of the class by fqn.
    """

    bytes: int
    stored_as_base: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PutReport:
    """The report of a put.

    Attributes:
        version: the version number.
        epoch: the number of rewinds of the key before this version.
        id: the identity of the version, 32 hex digits.
        digest: the digest of this contribution, 32 hex digits. Equal digests mean equal contents.
        visible: whether the version is visible to readers.
        missing: the writers whose contributions are missing.
        stored: whether the whole version is in the bucket, with durability="object".
        bytes: the number of bytes that this put stored.
        transport: the transport of the bytes: "cuda_ipc", "file", "memory", "object", "shared_memory", "tcp" or "tls".
        transport_reason: the reason why this transport was used.
        phases: the time of each phase, in seconds. "arrange": computing the layout of the archive. "begin":
            beginning the contribution, which may wait for other writers and for memory. A small archive is written
            before that; it is sent in the same request, and may be committed by it. "write": copying and
            checksumming. "commit": committing the contribution. "store": waiting until the contribution is in the
            bucket, if it must be there.
        seconds: the time of the put, in seconds.
        device_copies: how bytes of devices were copied; None if there were none.
        stored_as_base: the values whose class is a subclass of a builtin class, such as an `IntEnum`. They are stored
            as an object of the builtin class. The dict has the name of the class by fqn.
    """

    version: int
    epoch: int
    id: str
    digest: str
    visible: bool
    missing: list[int]
    stored: bool
    bytes: int
    transport: str
    transport_reason: str
    phases: dict[str, float]
    seconds: float
    device_copies: DeviceCopies | None = None
    stored_as_base: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GetReport:
    """The report of a get.

    Attributes:
        version: the version number.
        epoch: the number of rewinds of the key before this version.
        id: the identity of the version, 32 hex digits.
        digest: the digest of the version, 32 hex digits. If the version has one writer, it is the digest of its put.
        bytes_needed: the number of tensor bytes that were requested.
        bytes_transferred: the number of tensor bytes that were copied, or are seen through views.
        bytes_viewed: the number of these bytes that are seen through views.
        bytes_staged: the number of bytes that were copied to temporary tensors first, because the tensors in `into` are
            cast, computed, or on a device that the store cannot write to.
        bytes_received: the number of bytes received over a connection, from another host or a bucket. It can exceed the
            number of requested bytes: only whole chunks can be verified, and a longer range can be cheaper than
            another request.
        bytes_verified: the number of bytes that were verified against their checksums.
        transport: the transport of the bytes: "cuda_ipc", "file", "memory", "object", "shared_memory", "tcp" or "tls".
        transport_reason: the reason why this transport was used.
        plan_seconds: the time of planning the copies, in seconds.
        seconds: the time of the copies, in seconds.
        missing_keys: fqns in `into` that are not stored.
        unexpected_keys: fqns of stored tensors that are not in `into`.
        cast: fqns of tensors in `into` whose dtype differs from the stored one.
        device_copies: how bytes were copied to devices; None if `into` has no tensor on a device.
    """

    version: int
    epoch: int
    id: str
    digest: str
    bytes_needed: int
    bytes_transferred: int
    bytes_viewed: int
    bytes_staged: int
    bytes_received: int
    bytes_verified: int
    transport: str
    transport_reason: str
    plan_seconds: float
    seconds: float
    missing_keys: list[str]
    unexpected_keys: list[str]
    cast: list[str]
    device_copies: DeviceCopies | None = None


@dataclass(frozen=True)
class CommitReport:
    """The report of `StagedVersion.commit`.

    Attributes:
        version: the version number.
        bytes: the number of bytes that were copied to the tensors.
        seconds: the time of the copies, in seconds.
    """

    version: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class ReceiveReport:
    """The report of a version that was received through a ring.

    Attributes:
        version: the version number.
        buckets: the number of buckets of the version.
        bytes: the number of tensor bytes that were copied.
        transport: the transport of the bytes: "shared_memory" or "cuda_ipc".
        transport_reason: the reason why this transport was used.
        seconds: the time from the arrival of the first bucket to the end, in seconds.
        device_copies: how bytes were copied to GPUs; None if no tensor is on a GPU.
    """

    version: int
    buckets: int
    bytes: int
    transport: str
    transport_reason: str
    seconds: float
    device_copies: DeviceCopies | None = None


@dataclass(frozen=True)
class VersionInfo:
    """A visible version. It converts to an int, the version number.

    Attributes:
        version: the version number.
        epoch: the number of rewinds of the key before this version.
        id: the identity of the version, 32 hex digits.
        bytes: the total length of its archives, in bytes.
        writers: the global ranks that wrote it.
        since: when it became visible, in seconds since 1970.
        run: the run that put it: its `job`, or a text that is drawn when the store is opened. None: not known.
        metadata: the `metadata` of the put. Only `head` sets it; otherwise it is None.
    """

    version: int
    epoch: int
    id: str
    bytes: int
    writers: list[int]
    since: float
    run: str | None = None
    metadata: dict[str, Any] | None = None

    def __int__(self) -> int:
        return self.version

    def __index__(self) -> int:
        return self.version
