"""Strategies of torchstore: which of its volumes a process puts into.

A daemon has the memory of a whole host, so they decide nothing here; programs make them and pass them on.
"""

from __future__ import annotations

import os
import socket

from ._transport import TransportType

__all__ = ["ControllerStorageVolumes", "HostStrategy", "LocalRankStrategy", "TorchStoreStrategy"]


class TorchStoreStrategy:
    """What all strategies have.

    Args:
        default_transport_type: kept, and of no effect.
    """

    def __init__(self, default_transport_type: TransportType = TransportType.Unset) -> None:
        self.default_transport_type = default_transport_type

    @classmethod
    def get_volume_id(cls) -> str:
        """What torchstore would call this process's volume."""
        raise NotImplementedError(f"{cls.__name__} has no get_volume_id")

    @classmethod
    def get_client_id(cls) -> str:
        """What torchstore would call the volume that this process puts into."""
        return cls.get_volume_id()


class HostStrategy(TorchStoreStrategy):
    """A volume for each host."""

    @classmethod
    def get_volume_id(cls) -> str:
        """The name of this host."""
        return os.environ.get("HOSTNAME", socket.gethostname())


class LocalRankStrategy(TorchStoreStrategy):
    """A volume for each rank."""

    @classmethod
    def get_volume_id(cls) -> str:
        """RANK, else LOCAL_RANK, of the environment."""
        return os.environ.get("RANK") or os.environ["LOCAL_RANK"]


class ControllerStorageVolumes(TorchStoreStrategy):
    """One volume."""

    @classmethod
    def get_volume_id(cls) -> str:
        """The one."""
        return "0"
