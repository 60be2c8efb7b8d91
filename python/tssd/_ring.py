"""Options of a ring."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ring:
    """The ring of buckets that a version is streamed through, for `residency=` of PutOptions.

    Attributes:
        bucket_bytes: the size of a bucket, in bytes. Larger tensors are split.
        buckets: the number of buckets: one is filled while readers copy from the others.
        readers: the number of receivers that must be present when a put begins.
        in_place: whether receivers copy directly from tensors in the memory of a GPU, if the driver allows it, as with
            residency="in_place".
    """

    bucket_bytes: int = 512 << 20
    buckets: int = 2
    readers: int = 1
    in_place: bool = False
