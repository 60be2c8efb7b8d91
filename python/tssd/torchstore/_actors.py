"""Creation of Monarch actors."""

from __future__ import annotations

import importlib
import uuid
from typing import Any


async def spawn_actors(
    num_processes: int, actor_cls: type[Any], name: str, mesh: Any = None, **init_args: Any
) -> Any:
    """Spawns actors in `num_processes` new processes of this host, or in the processes of `mesh`."""
    if mesh is None:
        # Monarch is an optional dependency.
        mesh = importlib.import_module("monarch.actor").this_host().spawn_procs(per_host={"gpus": num_processes})
    await mesh.initialized
    return mesh.spawn(f"{name}_{uuid.uuid4().hex[:8]}", actor_cls, **init_args)
