"""Options of a put."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ._ring import Ring


@dataclass(frozen=True, kw_only=True, slots=True)
class PutOptions:
    """Options that few puts need, for `options=` of `Store.put_state_dict` and `Store.publish`.

    The put verifies the values.

    Args:
        on_divergence: how to handle a plain leaf whose values differ between writers. "error" rejects the version.
            "lowest" stores the value of the lowest writer. "keep" stores the value of each writer, and a get selects
            one with `writer=`.
        replicas: "primary" stores each replicated shard once. "all" stores every replica.
        keep_dtype: floating tensors that keep their dtype if the put has a `transfer_dtype`: fqns, or patterns such as
            "*.norm.weight".
        require_transport: the required transport. Any other transport is an error. None: any transport.
        rewind: whether the version number may be at or below the highest one. When this version becomes visible, the
            existing versions from its number on are retired.
        residency: where the tensors are after the put.
            "host": in the host's memory. Tensors of GPUs are copied there.
            "device": in the memory of their GPU, in an immutable copy, from which readers of the same GPU copy. Their
            bytes are not read, so they have no checksums. Where this is not possible, they are copied to the host's
            memory: the report's `transport_reason` says why, and `require_transport="cuda_ipc"` makes it an error.
            "ring", or a tssd.Ring: not retained. The tensors are sent bucket by bucket to all processes that have a
            `receiver` of the key. The put returns when all of these have received them. Only tensors are sent.
            "in_place": as "ring", but receivers copy directly from tensors in the memory of a GPU, if the driver
            allows it.
        check_finite: whether the put fails if an element of a tensor is NaN or infinite, in the dtype in which it is
            stored. It reads all elements once more. A version with several writers then does not become visible.
    """

    on_divergence: Literal["error", "lowest", "keep"] = "error"
    replicas: Literal["primary", "all"] = "primary"
    keep_dtype: str | Sequence[str] = ()
    require_transport: Literal["cuda_ipc", "file", "memory", "object", "shared_memory", "tcp", "tls"] | None = None
    rewind: bool = False
    residency: Literal["host", "device", "ring", "in_place"] | Ring = "host"
    check_finite: bool = False
