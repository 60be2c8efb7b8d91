"""How versions go through a ring."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ring:
    """How versions go through a ring, for `residency=` of a put.

    Attributes:
        bucket_bytes: how many bytes a bucket has; larger tensors are cut.
        buckets: how many there are: while readers copy from one, another one is filled.
        readers: how many receivers must be there when a put begins.
        lent: whether readers copy right from where tensors of GPUs are, where the driver lets them, as with
            residency="lent".
    """

    bucket_bytes: int = 512 << 20
    buckets: int = 2
    readers: int = 1
    lent: bool = False
