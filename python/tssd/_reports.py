"""What puts and gets have done, and what versions there are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PutReport:
    """What a put has done.

    Attributes:
        version: the number of the version.
        epoch: how often the key had been rewound.
        id: the identity of the version, 32 hex digits.
        visible: whether readers see it.
        missing: the writers whose contributions it waits for.
        bytes: how many bytes this put has stored.
        transport: how they went: "arena", "file", "memory", "tcp" or "tls".
        why: why that way.
        seconds: how long it took.
    """

    version: int
    epoch: int
    id: str
    visible: bool
    missing: list[int]
    bytes: int
    transport: str
    why: str
    seconds: float


@dataclass(frozen=True)
class GetReport:
    """What a get has done.

    Attributes:
        version: the number of the version.
        epoch: how often the key had been rewound.
        id: the identity of the version, 32 hex digits.
        bytes_needed: how many bytes of tensors were asked for.
        bytes_transferred: how many were copied.
        bytes_verified: how many were compared with their checksums.
        transport: how they came: "arena", "file", "memory", "tcp" or "tls".
        why: why that way.
        plan_seconds: how long it took to find out what to copy.
        seconds: how long the copy took.
    """

    version: int
    epoch: int
    id: str
    bytes_needed: int
    bytes_transferred: int
    bytes_verified: int
    transport: str
    why: str
    plan_seconds: float
    seconds: float


@dataclass(frozen=True)
class VersionInfo:
    """A visible version: an int where one is wanted.

    Attributes:
        version: its number.
        epoch: how often the key had been rewound.
        id: its identity, 32 hex digits.
        bytes: how many bytes its archives have.
        writers: the global ranks that wrote it.
    """

    version: int
    epoch: int
    id: str
    bytes: int
    writers: list[int]

    def __int__(self) -> int:
        return self.version

    def __index__(self) -> int:
        return self.version
