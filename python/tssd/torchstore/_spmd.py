"""Initialization and shutdown of torchstore in programs that torchrun starts."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from datetime import timedelta

from ..aio import _run_in_thread
from . import _api
from ._client import SETTINGS_KEY
from ._strategy import HostStrategy, LocalRankStrategy, TorchStoreStrategy


@dataclasses.dataclass(frozen=True)
class SPMDEnv:
    """The rank of this process, and the sizes and the master address of its job."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int

    @property
    def num_hosts(self) -> int:
        """The number of hosts."""
        return self.world_size // self.local_world_size

    @property
    def group_rank(self) -> int:
        """The index of this host."""
        return self.rank // self.local_world_size

    @classmethod
    def from_env(cls, *, master_addr: str | None = None, master_port: int | None = None) -> SPMDEnv:
        """Reads the environment variables that torchrun sets.

        Raises:
            RuntimeError: a variable is missing.
            ValueError: the number of ranks is not a multiple of the number of ranks per host.
        """
        rank, local_rank, world_size, local_world_size = (
            int(_require_variable(name)) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        )
        if world_size % local_world_size != 0:
            text = f"world_size ({world_size}) must be divisible by local_world_size ({local_world_size})"
            raise ValueError(text)
        addr, port = _require_variable("MASTER_ADDR", master_addr), int(_require_variable("MASTER_PORT", master_port))
        return cls(rank, local_rank, world_size, local_world_size, addr, port)


def _require_variable(name: str, default: object = None) -> str:
    value = os.environ.get(name, default)
    if value is None:
        raise RuntimeError(f"SPMD TorchStore initialization requires the {name} env var")
    return str(value)


# The stores that this process joined as a rank other than 0: the version of the settings, and the rendezvous timeout.
_joined: dict[str, tuple[int, timedelta]] = {}


async def initialize(
    strategy: TorchStoreStrategy | None = None,
    store_name: str = _api.DEFAULT_TORCHSTORE_NAME,
    *,
    env: SPMDEnv | None = None,
    rendezvous_timeout: timedelta = timedelta(seconds=120),
    transport: str = "ipc",
    monarch_port: int = 26600,
    allow_pickle: bool = False,
) -> None:
    """Joins the store that rank 0 starts or joins on this host.

    On several hosts, the daemon of each host must be connected to the others.

    Args:
        strategy: a HostStrategy or a LocalRankStrategy.
        store_name, allow_pickle: as for `initialize`.
        env: the ranks of this process. None: those in the environment.
        rendezvous_timeout: how long to wait for rank 0.
        transport, monarch_port: accepted, without effect.

    Raises:
        RuntimeError: the strategy is missing or of another class, a variable is missing in the environment, or rank 0
            did not initialize the store in time.
    """
    if not isinstance(strategy, (HostStrategy, LocalRankStrategy)):
        raise RuntimeError("SPMD mode requires an explicit HostStrategy or LocalRankStrategy")
    env = env or SPMDEnv.from_env()
    if env.rank == 0:
        await _api.initialize(env.world_size, strategy, store_name, allow_pickle=allow_pickle)
        return
    store = await _run_in_thread(lambda: _api.open_store(store_name))
    deadline = time.monotonic() + rendezvous_timeout.total_seconds()
    while (settings := await _run_in_thread(lambda: store.head(SETTINGS_KEY))) is None:
        if time.monotonic() > deadline:
            raise RuntimeError("Timed out waiting for rank 0 to initialize TorchStore")
        await asyncio.sleep(0.01)
    _joined[store_name] = settings.version, rendezvous_timeout


async def shutdown(store_name: str = _api.DEFAULT_TORCHSTORE_NAME) -> None:
    """Deletes everything in a store. Ranks that have joined it wait until rank 0 does so.

    Raises:
        RuntimeError: rank 0 did not delete it in time.
    """
    if store_name not in _joined:
        await _api.shutdown(store_name)
        return
    version, timeout = _joined.pop(store_name)
    _api.reset_client(store_name)
    store = await _run_in_thread(lambda: _api.open_store(store_name))
    deadline = time.monotonic() + timeout.total_seconds()
    while await _run_in_thread(lambda: store.exists(SETTINGS_KEY, version)):
        if time.monotonic() > deadline:
            raise RuntimeError("Timed out waiting for TorchStore shutdown")
        await asyncio.sleep(0.01)
