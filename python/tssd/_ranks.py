"""Who puts: ranks, the run that they belong to, and the groups that they form."""

from __future__ import annotations

import operator
import os
import sys
import uuid
import weakref
from typing import Any

from ._errors import make
from ._tssd import Store, TensorShard


def _distributed() -> Any:
    """torch.distributed, if this process has initialized it."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def rank() -> int | None:
    """The global rank of this process, if it is known."""
    distributed = _distributed()
    return None if distributed is None else int(distributed.get_rank())


def prove_covered(meshes: set[int]) -> None:
    """Refuses a put without `writers` if the meshes of its shards do not say who puts.

    Raises:
        TssdValueError: there are ranks that are in none of them.
    """
    distributed = _distributed()
    if distributed is None:
        return
    others = sorted(set(range(distributed.get_world_size())) - meshes)
    if others:
        named = f"ranks {sorted(meshes)}" if meshes else "no ranks"
        message = f"the meshes of the shards have {named}, and there are also ranks {others}"
        advice = "say writers=, who puts: how many, a list of global ranks, or a ProcessGroup"
        raise make("invalid", "", message, None, advice, None, None)


# The group that agreed, and on what.
_agreed: tuple[weakref.ref[Any], str] | None = None


def job() -> str | None:
    """A name of this run that all its ranks know and no other run has."""
    global _agreed
    distributed = _distributed()
    if distributed is not None:
        group = distributed.group.WORLD
        if _agreed is None or _agreed[0]() is not group:
            store = distributed.distributed_c10d._get_default_store()
            name = store.compare_set("tssd.job", "", uuid.uuid4().hex).decode()
            _agreed = weakref.ref(group), name
        return _agreed[1]
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run and run != "none":
        return f"{run}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return None


def is_sharded(state_dict: Any) -> bool:
    """Whether there are shards in a state dict, which may be no legal one."""
    values, seen = [state_dict], set()
    while values:
        value = values.pop()
        if isinstance(value, (dict, list, tuple)):
            # It may hold itself.
            if id(value) not in seen:
                seen.add(id(value))
                values += value.values() if isinstance(value, dict) else value
        elif isinstance(value, TensorShard) or hasattr(value, "device_mesh"):
            return True
        elif hasattr(value, "__create_chunk_list__"):
            return True
    return False


def writers(given: Any) -> list[int]:
    """Global ranks: of a count, of a list, of a ProcessGroup.

    Raises:
        TssdValueError: it is nobody.
    """
    ranks = _global_ranks(given)
    if not ranks:
        raise make("invalid", "", f"writers={given!r}: nobody would put", None, None, None, None)
    return ranks


# They are listed.
_MOST = 1 << 20


def _global_ranks(given: Any) -> list[int]:
    if isinstance(given, bool):
        raise TypeError("writers is a number, a list of global ranks or a ProcessGroup, not a bool")
    if isinstance(given, int):
        if given > _MOST:
            message = f"writers={given}: at most {_MOST} processes put one version"
            raise make("invalid", "", message, None, None, None, None)
        return list(range(given))
    distributed = _distributed()
    if distributed is not None and isinstance(given, distributed.ProcessGroup):
        return list(distributed.get_process_group_ranks(given))
    if isinstance(given, (str, bytes)):
        raise TypeError(f"writers is a number, a list of global ranks or a ProcessGroup, not {given!r}")
    ranks = [operator.index(each) for each in given]
    if any(not 0 <= each < 1 << 32 for each in ranks):
        message = f"writers={given!r}: a rank is an int from 0 to {(1 << 32) - 1}"
        raise make("invalid", "", message, None, None, None, None)
    return ranks


def connect(state: tuple[str, str | None, str | None, str | None, float]) -> Store:
    """A store that was pickled."""
    url, ca, cert, key_file, connect_timeout = state
    return Store(url, ca=ca, cert=cert, key_file=key_file, connect_timeout=connect_timeout)
