"""Tensors to fill, by the names of the stored tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._tssd import TensorShard


class Targets:
    """Tensors to fill, for `into=` of `Store.get_state_dict`, each with the fqn of its stored tensor.

    Unlike in a dict, a fqn may occur several times: the parts of one stored tensor can be in several tensors.

    Args:
        entries: pairs of an fqn, and a tensor or a TensorShard. A TensorShard says which part of the stored tensor its
            local tensor gets, which can be any view of a larger tensor.
    """

    entries: list[tuple[str, Any]]

    def __init__(self, entries: Iterable[tuple[str, Any | TensorShard[Any]]]) -> None:
        self.entries = list(entries)

    def __repr__(self) -> str:
        return f"Targets({len(self.entries)} tensors)"
