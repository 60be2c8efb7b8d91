"""What torch must know of tensors that were filled behind its back."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from ._tssd import TensorShard


def filled(objects: Iterable[Any]) -> None:
    """Counts a change of each tensor, so that a backward pass through what it was before is an error."""
    torch = sys.modules.get("torch")
    graph = getattr(getattr(torch, "autograd", None), "graph", None)
    increment = getattr(graph, "increment_version", None)
    if torch is None or increment is None:
        return
    for each in objects:
        tensor = each.local if isinstance(each, TensorShard) else each
        tensor = getattr(tensor, "_local_tensor", tensor)
        if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
            increment(tensor)
