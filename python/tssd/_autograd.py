"""Notifies torch's autograd of tensors that were filled in place."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from ._tssd import TensorShard


def increment_versions(objects: Iterable[Any]) -> None:
    """Increments the autograd version of each tensor.

    A backward pass that needs the values from before the fill then raises an error.
    """
    torch = sys.modules.get("torch")
    graph = getattr(getattr(torch, "autograd", None), "graph", None)
    increment = getattr(graph, "increment_version", None)
    if torch is None or increment is None:
        return
    for target in objects:
        tensor = target.local if isinstance(target, TensorShard) else target
        tensor = getattr(tensor, "_local_tensor", tensor)
        if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
            increment(tensor)
