"""The trainer side of the weight-transfer backend "tssd"."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed
from torch.distributed.tensor import DTensor
from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
)

import tssd

from .._errors import new_exception
from .._sync import SyncRecord, report_sync
from ..mapping import Mapping
from ._engine import acknowledgement_key


@dataclass
class TrainerInit(TrainerInitInfo):
    """What a trainer rank needs to send weights.

    Attributes:
        store: the address of the store, as for `tssd.Store`. The engine reaches the store at the same address, or at
            `engine_store`.
        key: the key of the weights.
        rank: the rank of this process. Rank 0 drives the update of the engine.
        engine_store: the address of the store for the workers of the engine. None: `store`.
        mapping: the checkpoint tensors that the parameters of the trainer consist of, as for `Store.put_state_dict`.
            The engine takes the names of checkpoints. transformers 5 stacks the experts of a model, for example.
        transfer_dtype: the dtype in which floating tensors are stored, as for `Store.put_state_dict`.
        check_finite: whether a put fails if a weight is NaN or infinite. The engine keeps the weights that it has.
        resets_prefix_cache: whether a commit resets the prefix cache of the engine, which is computed from the weights
            before. Running requests are computed again then.
        timeout: how many seconds to wait for other ranks, and for the engine.
    """

    backend: ClassVar[str] = "tssd"

    store: str
    key: str
    engine_store: str | None = None
    mapping: Mapping | None = None
    transfer_dtype: Any = None
    check_finite: bool = False
    resets_prefix_cache: bool = True
    timeout: float = 300.0
    token: str = field(default_factory=lambda: uuid.uuid4().hex)


class TrainerTransfer(TrainerWeightTransferEngine[TrainerInit]):
    """Puts the weights of a trainer into a store, and has an engine pull them.

    Each rank puts its own shards: nothing is gathered. Every rank calls each method; only rank 0 talks to the engine.
    `send_weights` is `put`, `stage` and `commit`. To serve on while bytes move, call these instead, and pause the
    engine for the commit only.
    """

    init_info_cls = TrainerInit

    def __init__(self, *, client: Any, source: Any, init_info: TrainerInit) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.rank = init_info.rank
        self._info = init_info
        self._store = tssd.Store(init_info.store)
        self._version = 0
        # The highest number that the next put can have if no other trainer puts.
        self._highest_next: int | None = None
        self._attempt = 0

    @classmethod
    def trainer_init(cls, init_info: TrainerInit, *, client: Any, source: Any = None) -> TrainerTransfer:
        """Connects to the store. Rank 0 has the workers of the engine connect to it too."""
        if source is None:
            raise ValueError('the backend "tssd" needs a source: ModuleSource(model)')
        trainer = cls(client=client, source=source, init_info=init_info)
        if trainer.is_sender:
            client.init_weight_transfer_engine(
                {
                    "store": init_info.engine_store or init_info.store,
                    "key": init_info.key,
                    "token": init_info.token,
                    "timeout": init_info.timeout,
                }
            )
        return trainer

    @property
    def version(self) -> int:
        """The version number of the last put. 0: there was none."""
        return self._version

    def put(self, version: int | None = None) -> tssd.PutReport:
        """Puts the weights of this rank as a part of a new version.

        If it fails on one rank, the version does not become visible. All ranks then call `put` again, with the weights
        of one step.

        Args:
            version: the version number, the same on all ranks. None: one more than the highest one.

        Raises:
            TssdValueError: another trainer has put a version under this key since the last put of this one; or
                `check_finite` is set, and a weight is NaN or infinite.
        """
        highest = self._highest_next
        if highest is not None:
            # A put that fails can have taken a number too.
            self._highest_next = highest + 1
        state, writers = self._local_state()
        report = self._store.put_state_dict(
            state,
            self._info.key,
            version=version,
            writers=writers,
            writer=None if writers is None else self.rank,
            mapping=self._info.mapping,
            transfer_dtype=self._info.transfer_dtype,
            timeout=self._info.timeout,
            options=tssd.PutOptions(check_finite=self._info.check_finite),
        )
        self._highest_next = report.version + 1
        if version is None and highest is not None and report.version > highest:
            text = f"key `{self._info.key}`: another trainer has put a version since the last put of this one"
            advice = "use one key for each trainer"
            raise new_exception("refused", "", text, None, advice, None, None, self._info.key, report.version)
        self._version = report.version
        self._report("trainer", bytes_needed=report.bytes, put_seconds=report.seconds)
        return report

    def stage(self) -> dict[str, dict[str, Any]]:
        """Has the engine fetch the last version, while it serves. Returns when all its workers have it.

        Returns:
            What each worker reports, on rank 0: "bytes_needed", "bytes_received", "stage_seconds", and "whole_names":
            the number of tensors that it fetched whole, because the model computes with them while it loads them.

        Raises:
            RuntimeError: a worker could not stage it. The engine goes on with the weights that it has.
            TssdTimeoutError: a rank has not put its part in time, or a worker did not report in time.
        """
        if not self.is_sender:
            return {}
        # Waiting in the workers would stop the engine.
        with self._store.wait_for_version(self._info.key, self._version, timeout=self._info.timeout) as visible:
            if visible.version != self._version:
                text = f"version {self._version} of key `{self._info.key}` is not visible: a rank has not put its part"
                advice = "put the weights of one step on all ranks again"
                raise new_exception("refused", "", text, None, advice, None, None, self._info.key, self._version)
        self.client.start_weight_update()
        self._attempt += 1
        self.client.update_weights({"version": self._version, "stage_only": True, "attempt": self._attempt})
        self.client.finish_weight_update()
        key = acknowledgement_key(self._info.key, self._info.token)
        with self._store.wait_for_version(
            key, self._attempt, timeout=self._info.timeout, run=self._info.token
        ) as acknowledged:
            reports: dict[str, dict[str, Any]] = self._store.get_state_dict(key, version=acknowledged)
        failed = [f"{worker}: {report['error']}" for worker, report in reports.items() if "error" in report]
        if failed:
            raise RuntimeError(f"version {self._version} is not staged. {'; '.join(failed)}")
        for worker, report in reports.items():
            numbers = {name: report[name] for name in ("bytes_needed", "bytes_received", "stage_seconds")}
            self._report(f"vllm {worker}", **numbers)
        return reports

    def commit(self) -> None:
        """Has the engine install the last version. It should not serve meanwhile."""
        if not self.is_sender:
            return
        started = time.monotonic()
        self.client.start_weight_update()
        self.client.update_weights({"version": self._version})
        self.client.finish_weight_update(weight_version=str(self._version))
        if self._info.resets_prefix_cache:
            reset_prefix_cache(self.client)
        self._report("vllm engine", pause_seconds=time.monotonic() - started)

    def send_weights(self) -> None:
        """Puts the weights, and has the engine install them."""
        self.put()
        self.stage()
        self.commit()

    def shutdown(self) -> None:
        """Deletes the reports of the workers, and disconnects."""
        if self.is_sender:
            self._store.delete(acknowledgement_key(self._info.key, self._info.token))
        self._store.close()

    def _report(self, role: str, **numbers: Any) -> None:
        """Reports a part of the update to the last version."""
        report_sync(SyncRecord(key=self._info.key, version=self._version, role=role, source=self._store.url, **numbers))

    def _local_state(self) -> tuple[dict[str, Any], int | None]:
        """Returns the tensors that this rank puts, and the number of ranks that put. None: the DTensors say it.

        Shards stay shards.
        """
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if isinstance(self.source, ModuleSource):
            parameters = {name: parameter.detach() for name, parameter in self.source._module.named_parameters()}
            if ranks == 1 or any(isinstance(parameter, DTensor) for parameter in parameters.values()):
                return parameters, None
            # Every rank has all tensors: each puts some of them.
            own = {name: tensor for at, (name, tensor) in enumerate(parameters.items()) if at % ranks == self.rank}
            return own, ranks
        if not hasattr(self.source, "iter_full"):
            # vLLM 0.32.
            if self.source.held_names() is not None:
                raise NotImplementedError("tssd does not support sources of which each rank holds a part, in vLLM 0.32")
            return {name: tensor for name, tensor in self.source if self.rank == 0}, ranks
        metas = {meta.name: meta for meta in self.source.metadata}
        if self.source.implements_iter_local():
            shards = {name: local_shard(metas[name], tensor, self.rank) for name, tensor in self.source.iter_local()}
            return {name: shard for name, shard in shards.items() if shard is not None}, ranks
        # Its iteration is a collective of all ranks. The first owner of a tensor puts it.
        full = self.source.iter_full()
        return {name: tensor for name, tensor in full if self.rank == min(metas[name].owners or (0,))}, ranks


def reset_prefix_cache(client: Any) -> None:
    """Has an engine forget what it has computed from the weights before, through a client of vLLM or one like `LLM`.

    Raises:
        RuntimeError: the engine could not reset its cache. It then gives tokens of both versions.
    """
    if hasattr(client, "reset_prefix_cache"):
        results = [client.reset_prefix_cache(reset_running_requests=True)]
    elif hasattr(client, "base_url"):
        import requests

        url = f"{client.base_url}/reset_prefix_cache"
        response = requests.post(url, params={"reset_running_requests": "true"}, timeout=client.timeout)
        response.raise_for_status()
        results = [response.json().get("success", True)]
    elif hasattr(client, "handles"):
        import ray

        results = ray.get([handle.reset_prefix_cache.remote(True) for handle in client.handles])
    else:
        text = f"{type(client).__name__} has no `reset_prefix_cache`: the engine would reuse results of old weights"
        raise RuntimeError(f"{text}; help: add the method, or set resets_prefix_cache=False and reset it elsewhere")
    if not all(result in (True, None) for result in results):
        raise RuntimeError("the engine could not reset its prefix cache; help: pause it before the commit")


def local_shard(meta: Any, tensor: torch.Tensor, rank: int) -> torch.Tensor | tssd.TensorShard[Any] | None:
    """Returns the shard that a rank has of a parameter. None: another rank puts the same elements.

    Args:
        meta: the `ParamMeta` of vLLM 0.33: the mesh of the owners, row-major, and its placements.
        tensor: what the source has on this rank.
        rank: the rank in the trainer.
    """
    owners = meta.owners or (0,)
    if meta.placements is None:
        return tensor if rank == min(owners) else None
    offsets, sizes = [0] * len(meta.shape), list(meta.shape)
    at, is_primary = owners.index(rank), True
    coordinates = []
    for size in reversed(meta.mesh_shape):
        at, coordinate = divmod(at, size)
        coordinates.append(coordinate)
    for size, coordinate, placement in zip(meta.mesh_shape, reversed(coordinates), meta.placements):
        dim = getattr(placement, "dim", None)
        if dim is None:
            is_primary = is_primary and coordinate == 0
            continue
        # As `torch.chunk`: the last shards can be smaller, or empty.
        chunk = -(-sizes[dim] // size)
        start = min(coordinate * chunk, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(chunk, sizes[dim] - start)
    if not is_primary:
        return None
    return tssd.TensorShard(tensor, tssd.TensorSlice(offsets, None, list(meta.shape), sizes, None))
