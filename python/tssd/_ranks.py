"""The writers of a put: the rank of this process, the name of its run, and the ranks of groups."""

from __future__ import annotations

import operator
import os
import sys
import uuid
import weakref
from typing import Any

from ._errors import new_exception
from ._tssd import _abridge as abridge
from ._tssd import Store, TensorShard


def _distributed() -> Any:
    """Returns torch.distributed. None if this process has not initialized it."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def rank() -> int | None:
    """Returns the global rank of this process. None if it is unknown."""
    distributed = _distributed()
    return None if distributed is None else int(distributed.get_rank())


def verify_mesh_coverage(mesh_ranks: set[int]) -> None:
    """Checks that the meshes of the shards determine the writers of a put without `writers`.

    Raises:
        TssdValueError: torch.distributed has ranks that are in none of the meshes.
    """
    distributed = _distributed()
    if distributed is None:
        return
    missing = sorted(set(range(distributed.get_world_size())) - mesh_ranks)
    if missing:
        found = f"ranks {sorted(mesh_ranks)}" if mesh_ranks else "no ranks"
        message = f"the meshes of the shards have {found}, and there are also ranks {missing}"
        advice = "say writers=, who puts: how many, a list of global ranks, or a ProcessGroup"
        raise new_exception("invalid", "", message, None, advice, None, None)


# The default process group, and the job name that its ranks agreed on.
_job_of_group: tuple[weakref.ref[Any], str] | None = None


def job() -> str | None:
    """Returns the name of this run. None if it is unknown.

    All ranks of a run return the same name, and no other run has that name.
    """
    global _job_of_group
    distributed = _distributed()
    if distributed is not None:
        group = distributed.group.WORLD
        if _job_of_group is None or _job_of_group[0]() is not group:
            store = distributed.distributed_c10d._get_default_store()
            name = store.compare_set("tssd.job", "", uuid.uuid4().hex).decode()
            _job_of_group = weakref.ref(group), name
        return _job_of_group[1]
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id and run_id != "none":
        return f"{run_id}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return None


def is_sharded(state_dict: Any) -> bool:
    """Returns whether a state dict contains shards. The state dict may be invalid."""
    values, seen = [state_dict], set()
    while values:
        value = values.pop()
        if isinstance(value, (dict, list, tuple)):
            # A container may contain itself.
            if id(value) not in seen:
                seen.add(id(value))
                values += value.values() if isinstance(value, dict) else value
        elif isinstance(value, TensorShard) or hasattr(value, "device_mesh"):
            return True
        elif hasattr(value, "__create_chunk_list__"):
            return True
    return False


def parse_writers(argument: Any) -> list[int]:
    """Returns the global ranks that `writers=` means: a count, a list of ranks, or a ProcessGroup.

    Raises:
        TssdValueError: there is no rank, the count is too large, or a rank is out of range.
        TypeError: the argument is a bool, or a str or bytes.
    """
    ranks = _global_ranks(argument)
    if not ranks:
        raise new_exception("invalid", "", f"writers={argument!r}: nobody would put", None, None, None, None)
    return ranks


# The maximum count of writers. A count is expanded to a list of ranks.
_MAX_WRITERS = 1 << 20


def _global_ranks(argument: Any) -> list[int]:
    if isinstance(argument, bool):
        raise TypeError("writers is a number, a list of global ranks or a ProcessGroup, not a bool")
    if isinstance(argument, int):
        if argument > _MAX_WRITERS:
            message = f"writers={argument}: at most {_MAX_WRITERS} processes put one version"
            raise new_exception("invalid", "", message, None, None, None, None)
        return list(range(argument))
    distributed = _distributed()
    if distributed is not None and isinstance(argument, distributed.ProcessGroup):
        return list(distributed.get_process_group_ranks(argument))
    if isinstance(argument, (str, bytes)):
        raise TypeError(abridge(f"writers is a number, a list of global ranks or a ProcessGroup, not {argument!r}"))
    ranks = [operator.index(rank) for rank in argument]
    if any(not 0 <= rank < 1 << 32 for rank in ranks):
        message = f"writers={argument!r}: a rank is an int from 0 to {(1 << 32) - 1}"
        raise new_exception("invalid", "", message, None, None, None, None)
    return ranks


def connect(state: tuple[str, str | None, str | None, str | None, float]) -> Store:
    """Recreates a pickled `Store`, and connects it."""
    url, ca, cert, key_file, connect_timeout = state
    return Store(url, ca=ca, cert=cert, key_file=key_file, connect_timeout=connect_timeout)
