"""Strategies of torchstore, which select the volume that a process puts into.

A daemon serves the memory of a whole host, so strategies have no effect here. Programs create them and pass them on.
"""

from __future__ import annotations

import os
import socket

from ._transport import TransportType

__all__ = ["ControllerStorageVolumes", "HostStrategy", "LocalRankStrategy", "TorchStoreStrategy"]


class TorchStoreStrategy:
    """The base class of strategies.

    Args:
        default_transport_type: stored, without effect.
    """

    def __init__(self, default_transport_type: TransportType = TransportType.Unset) -> None:
        self.default_transport_type = default_transport_type

    @classmethod
    def get_volume_id(cls) -> str:
        """Returns the ID that torchstore would give the volume of this process."""
        raise NotImplementedError(f"{cls.__name__} must implement 'get_volume_id'")

    @classmethod
    def get_client_id(cls) -> str:
        """Returns the ID that torchstore would give the volume that this process puts into."""
        return cls.get_volume_id()


class HostStrategy(TorchStoreStrategy):
    """One volume for each host."""

    @classmethod
    def get_volume_id(cls) -> str:
        """Returns the name of this host."""
        return os.environ.get("HOSTNAME", socket.gethostname())


class LocalRankStrategy(TorchStoreStrategy):
    """One volume for each rank."""

    @classmethod
    def get_volume_id(cls) -> str:
        """Returns RANK of the environment; if it is not set, LOCAL_RANK."""
        return os.environ.get("RANK") or os.environ["LOCAL_RANK"]


class ControllerStorageVolumes(TorchStoreStrategy):
    """A single volume."""

    @classmethod
    def get_volume_id(cls) -> str:
        """Returns the ID of the single volume."""
        return "0"
