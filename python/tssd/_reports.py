"""What puts and gets have done, and what versions there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DeviceCopies:
    """How bytes came from GPUs and other devices, or went there.

    Attributes:
        pinned: how many bytes were copied straight from or to page-locked memory, at the speed of the bus.
        pageable: how many were copied once more on their way.
        device: how many stayed on a GPU: they were copied from its memory to its memory.
        why: why some were copied once more, the last time; None if none were.
    """

    pinned: int
    pageable: int
    device: int
    why: str | None


@dataclass(frozen=True)
class PutReport:
    """What a put has done.

    Attributes:
        version: the number of the version.
        epoch: how often the key had been rewound.
        id: the identity of the version, 32 hex digits.
        digest: what this put contains, 32 hex digits: equal digests are equal contents.
        visible: whether readers see it.
        missing: the writers whose contributions it waits for.
        stored: whether all of the version is in the bucket, with durability="object".
        bytes: how many bytes this put has stored.
        transport: how they went: "arena", "cuda_ipc", "file", "memory", "object", "tcp" or "tls".
        why: why that way.
        phases: where the time went, in seconds: "arrange" until every byte had its place, "begin" until
            there was room for it (others may have been waited for; what is small is written before, goes
            along, and may be committed then), "write" to copy and to checksum, "commit", "store" until it was in the bucket, if it was to be.
        seconds: how long it took.
        device_copies: how bytes of devices came; None if there were none.
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
    why: str
    phases: dict[str, float]
    seconds: float
    device_copies: DeviceCopies | None = None


@dataclass(frozen=True)
class GetReport:
    """What a get has done.

    Attributes:
        version: the number of the version.
        epoch: how often the key had been rewound.
        id: the identity of the version, 32 hex digits.
        digest: what the version contains, 32 hex digits; of one writer, the digest of its put.
        bytes_needed: how many bytes of tensors were asked for.
        bytes_transferred: how many were copied, or are seen through views.
        bytes_viewed: how many of these are seen through views.
        bytes_received: how many came over a connection, from another host or a bucket: more than were asked for where
            whole chunks are needed to prove parts of them.
        bytes_verified: how many were compared with their checksums.
        transport: how they came: "arena", "cuda_ipc", "file", "memory", "object", "tcp" or "tls".
        why: why that way.
        plan_seconds: how long it took to find out what to copy.
        seconds: how long the copy took.
        missing_keys: fqns in `into` that are not stored.
        unexpected_keys: fqns of tensors that are stored and not in `into`.
        cast: fqns in `into` of another dtype than is stored.
        device_copies: how bytes went to devices; None if `into` has no tensor of one.
    """

    version: int
    epoch: int
    id: str
    digest: str
    bytes_needed: int
    bytes_transferred: int
    bytes_viewed: int
    bytes_received: int
    bytes_verified: int
    transport: str
    why: str
    plan_seconds: float
    seconds: float
    missing_keys: list[str]
    unexpected_keys: list[str]
    cast: list[str]
    device_copies: DeviceCopies | None = None


@dataclass(frozen=True)
class ReceiveReport:
    """What came through a ring.

    Attributes:
        version: the number of the version.
        buckets: in how many buckets it came.
        bytes: how many bytes of tensors were copied.
        transport: how they came: "arena" or "cuda_ipc".
        why: why that way.
        seconds: how long it took, from when its first bucket was there.
        device_copies: how bytes went to GPUs; None if no tensor is on one.
    """

    version: int
    buckets: int
    bytes: int
    transport: str
    why: str
    seconds: float
    device_copies: DeviceCopies | None = None


@dataclass(frozen=True)
class VersionInfo:
    """A visible version: an int where one is wanted.

    Attributes:
        version: its number.
        epoch: how often the key had been rewound.
        id: its identity, 32 hex digits.
        bytes: how many bytes its archives have.
        writers: the global ranks that wrote it.
        metadata: what was given with it when it was put, if `head` tells of it.
    """

    version: int
    epoch: int
    id: str
    bytes: int
    writers: list[int]
    metadata: dict[str, Any] | None = None

    def __int__(self) -> int:
        return self.version

    def __index__(self) -> int:
        return self.version
