"""TSSD in verl: the checkpoint engine "tssd".

verl imports this module in each of its processes, if its configuration says so:

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: tssd
      custom_backend_module: tssd.verl
      engine_kwargs: {tssd: {store: "unix:rl", key: "policy"}}

In each round, the actor ranks put one version of a key together, and each rollout rank reads it.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from . import aio
from ._errors import new_exception
from ._options import PutOptions
from ._sync import SyncRecord, report_sync
from ._tssd import TensorShard, TensorSlice

__all__ = ["StoreCheckpointEngine"]


@dataclass(frozen=True)
class _Round:
    """One transfer of the weights. `id` is the job of its puts: a put of a newer round ends those of older rounds."""

    id: str
    rank: int
    world_size: int


@CheckpointEngineRegistry.register("tssd")
class StoreCheckpointEngine(CheckpointEngine):  # type: ignore[misc, unused-ignore]
    """Puts the weights of the actor ranks into a store, from which the rollout ranks read them.

    Args:
        bucket_size: how many bytes of tensors an actor rank holds before it writes them, and a rollout rank fetches
            ahead.
        is_master: whether this process is actor rank 0.
        store: the address of the store, as for `tssd.Store`. None: the value of TSSD_STORE, else "unix:default".
        key: the key of the weights. One trainer at a time puts to it.
        keep: how many versions of the key the store retains.
        durability, transfer_dtype: as for `Store.put_state_dict`.
        keep_dtype: as for `PutOptions`.
        device: the device to which a rollout rank reads tensors before it yields them, such as "cuda". None: they are
            views of the shared memory of the store, or copies in the host's memory if the store is on another host.
        verify: whether a rollout rank verifies the checksums.
        timeout: how many seconds to wait for other processes, for memory, and for bytes of other hosts.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        store: str | None = None,
        key: str = "policy",
        keep: int = 1,
        durability: Any = "memory",
        transfer_dtype: str | None = None,
        keep_dtype: str | Sequence[str] = (),
        device: str | None = None,
        verify: bool = True,
        timeout: float = 300.0,
    ) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        self._store = aio.Store(store, connect_timeout=min(timeout, 30.0))
        self._key, self._keep = key, keep
        self._durability, self._transfer_dtype = durability, transfer_dtype
        # verl passes lists of its configuration as objects of a class of its own.
        self._put_options = PutOptions(keep_dtype=keep_dtype if isinstance(keep_dtype, str) else list(keep_dtype))
        self._device, self._verify, self._timeout = device, verify, timeout
        self._round: _Round | None = None
        self._opening: asyncio.Future[aio.OpenVersion] | None = None
        self._opened: aio.OpenVersion | None = None

    def prepare(self) -> dict[str, Any]:
        """Ends the last round, if it has failed. Actor rank 0 begins a round, and returns its identity."""
        self.finalize()
        if not self.is_master:
            return {}
        self._store._wrapped.retain(self._key, self._keep)
        return {"round_id": uuid.uuid4().hex}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Passes the identity of the round to all ranks. They communicate through the store only."""

        def arguments(size: int) -> dict[str, list[Any]]:
            round_id = metadata[0]["round_id"]
            return {"rank": list(range(size)), "world_size": [size] * size, "round_id": [round_id] * size}

        return arguments(actor_wg_world_size), arguments(rollout_world_size)

    def init_process_group(self, rank: int, world_size: int, round_id: str) -> None:
        """Notes the round, and the rank of this process among the actor ranks or among the rollout ranks."""
        self._round = _Round(round_id, rank, world_size)

    def finalize(self) -> None:
        """Ends the round: releases the version, and cancels a wait for one that has not come."""
        self._round = None
        opening, self._opening = self._opening, None
        if opening is not None and not opening.done():
            opening.get_loop().call_soon_threadsafe(opening.cancel)
        self._close()

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Puts the part of this actor rank as a contribution to the version of the round.

        Args:
            weights: pairs of a name and the whole tensor, in the same order on all ranks. Each tensor is put by one
                rank. Or a training engine of verl: each rank puts its shards, and nothing is gathered.
            global_steps: the step of the trainer. It is the metadata "global_steps" of the version.

        Returns:
            On rank 0, the numbers of the SyncRecord, which verl adds to the metrics of the step.
        """
        round = self._begun_round()
        started = time.monotonic()
        publisher = self._store._wrapped.publish(
            self._key,
            writers=round.world_size,
            writer=round.rank,
            job=round.id,
            bucket_bytes=self.bucket_size,
            durability=self._durability,
            metadata={"global_steps": global_steps},
            transfer_dtype=self._transfer_dtype,
            timeout=self._timeout,
            options=self._put_options,
        )
        is_engine = hasattr(weights, "get_per_tensor_param_shard")
        parts = _shards_of(weights, round.rank) if is_engine else _divide(ensure_async_iterator(weights), round)
        try:
            with publisher:
                async for name, part in parts:
                    if part is not None:
                        publisher.put(name, part)
        finally:
            # The iteration is a collective: without this rank, the others would wait in it.
            async for _ in parts:
                pass
        report = publisher.report
        assert report is not None
        seconds = time.monotonic() - started
        record = self._report("verl actor", report.version, bytes_needed=report.bytes, put_seconds=seconds)
        return record.metrics() if round.rank == 0 else {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Waits for the version of the round, and yields its tensors in the order in which they were sent.

        The version is leased until `finalize`. The next tensors are read and verified while the consumer has some.

        Raises:
            TssdTimeoutError: an actor rank has not put its part in time.
            TssdValueError: a newer round has begun.
        """
        version = await self._open(self._begun_round(), global_steps)
        bytes_needed, bytes_received, stage_seconds, commit_seconds = 0, 0, 0.0, 0.0
        fetching: asyncio.Task[_Batch] | None = None
        try:
            batches = _cut(await version.to_meta(), self.bucket_size)
            for index in range(len(batches)):
                batch = await (fetching or self._fetch(version, batches[index]))
                fetching = None
                if index + 1 < len(batches):
                    fetching = asyncio.create_task(self._fetch(version, batches[index + 1]))
                bytes_needed += batch.bytes_needed
                bytes_received += batch.bytes_received
                stage_seconds += batch.seconds
                started = time.monotonic()
                for name in batches[index]:
                    yield name, batch.tensors[name]
                commit_seconds += time.monotonic() - started
        except BaseException:
            if fetching is not None:
                fetching.cancel()
                await asyncio.wait([fetching])
            self._close()
            raise
        self._report(
            "verl rollout",
            version.version,
            bytes_needed=bytes_needed,
            bytes_received=bytes_received,
            stage_seconds=stage_seconds,
            commit_seconds=commit_seconds,
        )

    def _begun_round(self) -> _Round:
        if self._round is None:
            raise RuntimeError("the checkpoint engine has no round: call prepare and init_process_group first")
        return self._round

    async def _open(self, round: _Round, global_steps: int | None) -> aio.OpenVersion:
        """Waits until all actor ranks have put their parts, and leases the version."""
        opening = self._store.wait_for_version(self._key, timeout=self._timeout, run=round.id)
        self._opening = asyncio.ensure_future(opening)
        weights = f"the weights of step {global_steps} are not in the store: "
        try:
            self._opened = await self._opening
        except asyncio.CancelledError:
            if self._round is round:
                raise
            raise new_exception("overtaken", "", weights + "a newer round has begun", None, None, None, None) from None
        except TimeoutError as error:
            text = f"{weights}not all actor ranks have put their parts of key `{self._key}` in {self._timeout} seconds"
            advice = "look for errors of the actor ranks, or set a longer `timeout` in engine_kwargs"
            raise new_exception("timeout", "", text, None, advice, None, None, self._key) from error
        return self._opened

    async def _fetch(self, version: aio.OpenVersion, metas: dict[str, torch.Tensor]) -> _Batch:
        """Reads tensors of a version, and verifies them."""
        started = time.monotonic()
        options: dict[str, Any] = {"version": version, "verify": self._verify, "timeout": self._timeout}
        if self._device is None:
            options["names"] = list(metas)
        else:
            options["strict"] = False
            options["into"] = {name: torch.empty_like(meta, device=self._device) for name, meta in metas.items()}
        tensors, report = await self._store.get_state_dict(self._key, return_report=True, **options)
        seconds = time.monotonic() - started
        return _Batch(tensors, report.bytes_needed, report.bytes_received, seconds)

    def _close(self) -> None:
        """Releases the version."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened._wrapped.close()

    def _report(self, role: str, version: int, **numbers: Any) -> SyncRecord:
        record = SyncRecord(key=self._key, version=version, role=role, source=self._store.url, **numbers)
        report_sync(record)
        return record


@dataclass(frozen=True)
class _Batch:
    """Tensors that were read together, and the numbers of their read."""

    tensors: dict[str, torch.Tensor]
    bytes_needed: int
    bytes_received: int
    seconds: float


def _cut(metas: dict[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    """Cuts tensors into batches of at most `size` bytes. A larger tensor is a batch of its own."""
    batches: list[dict[str, torch.Tensor]] = []
    room = -1
    for name, meta in metas.items():
        room -= meta.nbytes
        if room < 0:
            batches.append({})
            room = size - meta.nbytes
        batches[-1][name] = meta
    return batches


async def _divide(weights: AsyncIterator[tuple[str, torch.Tensor]], round: _Round) -> AsyncIterator[tuple[str, Any]]:
    """Yields, for each whole tensor, what this rank puts of it. None: nothing.

    The rank that has put the fewest bytes puts the next tensor. All ranks come to the same result, as all have all
    tensors. Rank 0 puts an empty shard of each tensor of the others: the entries of a version have the order of the
    lowest rank that puts them.
    """
    loads = [0] * round.world_size
    async for name, whole in weights:
        tensor = whole.detach()
        shape = list(tensor.shape)
        # A tensor without dimensions has no empty shard.
        owner = loads.index(min(loads)) if shape else 0
        loads[owner] += tensor.nbytes
        zeros = [0] * len(shape)
        if owner == round.rank:
            # The writer cuts plain tensors that are larger than a bucket. Readers would have to join the parts.
            yield name, TensorShard(tensor, TensorSlice(zeros, None, shape, shape, None)) if shape else tensor
        elif round.rank == 0:
            nothing = torch.empty(zeros, dtype=tensor.dtype)
            yield name, TensorShard(nothing, TensorSlice(zeros, None, shape, zeros, None))
        else:
            yield name, None


async def _shards_of(engine: Any, rank: int) -> AsyncIterator[tuple[str, Any]]:
    """Yields the shards of a training engine of verl, as DTensors. Rank 0 puts what is not sharded."""
    shards: Iterator[tuple[str, torch.Tensor, Any]] = engine.get_per_tensor_param_shard()[0]
    for name, local, spec in shards:
        if spec.place is not None or spec.to_hf_chunk is not None or spec.hf_slots is not None:
            text = "the shards of this training engine are not those of the checkpoint's tensor"
            advice = "send the whole tensors: `send_weights(engine.get_per_tensor_param()[0])`"
            raise new_exception("unsupported", "", text, name, advice, None, None)
        shape = torch.Size(spec.full_shape)
        if spec.mesh is None:
            yield name, local.view(shape) if rank == 0 else None
            continue
        local_shape, _ = compute_local_shape_and_global_offset(shape, spec.mesh, spec.placements)
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        local = local.view(local_shape)
        yield name, DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride)
