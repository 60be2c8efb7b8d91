"""Storage of `torch.distributed.checkpoint` (DCP) in stores.

    dcp.save(state_dict, storage_writer=TssdWriter("checkpoints"))
    dcp.load(state_dict, storage_reader=TssdReader("checkpoints"))

A checkpoint is a version of a key: a flat state dict with one tensor for each fqn. `Store.get_state_dict` reads it in
any sharding. Items that are not tensors to DCP are stored as bytes, which only DCP can decode.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import uuid
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ._errors import TssdKeyError, new_exception
from ._reports import PutReport
from ._tssd import OpenVersion, Store, load, save

__all__ = ["TssdReader", "TssdWriter"]

_PathOrUrl = str | os.PathLike[str]

# The leaf with the metadata that the index lacks: an archive with the names of the byte items, and the planner data.
_METADATA_LEAF = ".metadata"


class _CheckpointLocation:
    """The location of checkpoints: the base class of writers and readers."""

    def __init__(self, path_or_url: _PathOrUrl, key: str) -> None:
        self._path_or_url = os.fspath(path_or_url)
        self._base_key = key

    @property
    def checkpoint_id(self) -> str:
        """The directory, or the address of the store."""
        return self._path_or_url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _PathOrUrl) -> bool:
        """Returns whether the ID is the address of a store, or the path of a directory that can be one."""
        return _is_url(os.fspath(checkpoint_id)) or FileSystemReader.validate_checkpoint_id(checkpoint_id)

    def _set_checkpoint_id(self, checkpoint_id: _PathOrUrl | None) -> None:
        if checkpoint_id:
            self._path_or_url = os.fspath(checkpoint_id)

    def _rank_key(self, rank: int | None) -> str:
        """Returns the key of a rank. Ranks that save without collectives have one checkpoint each."""
        return self._base_key if rank is None else f"{self._base_key}/rank{rank}"


def _is_url(path_or_url: str) -> bool:
    buckets = ("abfs://", "abfss://", "az://", "azure://", "gs://", "s3://", "s3a://")
    return path_or_url.startswith(("file:", "memory:", "tcp:", "tls:", "unix:", *buckets))


@dataclasses.dataclass(frozen=True)
class _Contribution:
    """The contribution of a rank to a version."""

    job: str
    writer: int
    writers: int


class TssdWriter(_CheckpointLocation, StorageWriter):
    """Writes checkpoints of DCP: `dcp.save(state_dict, storage_writer=TssdWriter(path))`, or `async_save`.

    Each save is a new version. It becomes visible when all ranks have written it; until then, readers see the previous
    version.

    Args:
        path_or_url: a directory, which is created if it does not exist, or an address that `tssd.Store` accepts. The
            `checkpoint_id` of a save replaces it.
        key: the name of the checkpoint in that store.
        durability: as for `Store.put_state_dict`. A daemon supports "disk" if it has a directory, and "object" if it
            has a bucket.
    """

    def __init__(
        self,
        path_or_url: _PathOrUrl,
        key: str = "checkpoint",
        *,
        durability: Literal["memory", "disk", "object"] = "disk",
    ) -> None:
        super().__init__(path_or_url, key)
        self._durability: Literal["memory", "disk", "object"] = durability
        self._save_id = uuid.uuid4().hex
        self._rank: int | None = None
        self._last_contribution: _Contribution | None = None

    def reset(self, checkpoint_id: _PathOrUrl | None = None) -> None:
        """Starts another checkpoint."""
        self._set_checkpoint_id(checkpoint_id)
        self._save_id = uuid.uuid4().hex

    def storage_meta(self) -> StorageMeta:
        """Returns the metadata of this writer for the planner."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Records whether the ranks save together."""
        self._rank = None if kwargs.get("use_collectives", True) else kwargs.get("rank")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan unchanged.

        Raises:
            TssdValueError: the plan stands for one that the planner has cached, or has an item named `.metadata`.
        """
        _reject_cached_plans([plan])
        if any(item.index.fqn == _METADATA_LEAF for item in plan.items):
            message = "it is the name of what the checkpoint says of itself"
            raise new_exception("invalid", "", message, _METADATA_LEAF, "save the item under another name", None, None)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assigns a contribution to each rank. `finish` puts one more contribution, the last.

        Raises:
            TssdValueError: a plan stands for one that the planner has cached.
        """
        _reject_cached_plans(plans)
        writers = len(plans) + 1
        job = uuid.uuid4().hex
        *contributions, self._last_contribution = (_Contribution(job, writer, writers) for writer in range(writers))
        return [dataclasses.replace(plan, storage_data=each) for plan, each in zip(plans, contributions)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Puts the items of this rank.

        Raises:
            TssdError: as `Store.put_state_dict`.
        """
        leaves: dict[str, Any] = {}
        boxes: dict[str, list[_Box]] = {}
        shapes: dict[str, torch.Size] = {}
        results: list[WriteResult] = []
        for item in plan.items:
            name = item.index.fqn
            data = planner.resolve_data(item)
            if isinstance(data, io.BytesIO):
                leaves[name] = data.getvalue()
                size = len(leaves[name])
            else:
                leaves[name] = data.detach()
                size = data.nbytes
            # A shard stays a shard even if it is the whole tensor: other ranks may have empty shards.
            if item.type is WriteItemType.SHARD:
                assert item.tensor_data is not None
                shapes[name] = item.tensor_data.size
                boxes.setdefault(name, []).append((leaves[name], item.tensor_data.chunk.offsets))
            results.append(WriteResult(item.index, size, None))
        leaves.update((name, _PartialTensor(its_boxes, shapes[name])) for name, its_boxes in boxes.items())
        self._put(leaves, plan.storage_data)
        return _completed(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Puts the metadata that the index of the version lacks. The version then becomes visible.

        Raises:
            TssdError: as `Store.put_state_dict`; or contributions to the version are missing.
        """
        assert self._last_contribution is not None
        metadata.storage_meta = self.storage_meta()
        entries = metadata.state_dict_metadata.items()
        byte_items = [name for name, entry in entries if isinstance(entry, BytesStorageMetadata)]
        extra = {"bytes": byte_items, "planner_data": metadata.planner_data}
        report = self._put({_METADATA_LEAF: save(extra)}, self._last_contribution)
        if not report.visible:
            message = f"version {report.version} lacks what ranks {report.missing} should have put"
            raise new_exception("invalid", "", message, None, None, None, None, self._rank_key(self._rank), report.version)

    def _put(self, leaves: dict[str, Any], contribution: _Contribution) -> PutReport:
        with Store(self._path_or_url) as store:
            report: PutReport = store.put_state_dict(
                leaves,
                self._rank_key(self._rank),
                job=contribution.job,
                writer=contribution.writer,
                writers=contribution.writers,
                durability=self._durability,
            )
        return report


def _reject_cached_plans(plans: Iterable[SavePlan]) -> None:
    """Rejects cached plans: their contributions belong to an earlier version."""
    if not all(getattr(plan, "usable", True) for plan in plans):
        message, advice = "the planner has kept its plan", "say enable_plan_caching=False"
        raise new_exception("invalid", "", message, None, advice, None, None)


class TssdReader(_CheckpointLocation, StorageReader):
    """Reads checkpoints of DCP in any sharding: `dcp.load(state_dict, storage_reader=TssdReader(path))`.

    It also reads the tensors of versions that `Store.put_state_dict` put, by their fqns. Floating tensors are cast;
    other tensors must have the stored dtype.

    Args:
        path_or_url: a directory, or an address that `tssd.Store` accepts. The `checkpoint_id` of a load
            replaces it.
        key: the name of the checkpoint in that store.
        version: the version number. None: the newest version.
    """

    def __init__(
        self, path_or_url: _PathOrUrl, key: str = "checkpoint", *, version: int | None = None
    ) -> None:
        super().__init__(path_or_url, key)
        self._version = version
        self._load_id = uuid.uuid4().hex
        self._opened: tuple[Store, OpenVersion] | None = None

    def reset(self, checkpoint_id: _PathOrUrl | None = None) -> None:
        """Starts another load."""
        self._set_checkpoint_id(checkpoint_id)
        self._load_id = uuid.uuid4().hex
        self._close()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Opens the version and returns the metadata of the checkpoint.

        Each tensor has one chunk, for any number of ranks that wrote it. The version stays open until `read_data`
        has read it.

        Raises:
            TssdFileNotFoundError: the directory does not exist.
            TssdKeyError: the key or version does not exist.
        """
        self._close()
        path = self._path_or_url
        if not _is_url(path) and not os.path.isdir(path):
            # `Store` would create the directory.
            raise new_exception("Io", "", "", None, None, path, errno.ENOENT)
        store = Store(path)
        version = store.open(self._rank_key(kwargs.get("rank")), version=self._version)
        self._opened = store, version
        extra = _read_extra_metadata(store, version)
        entries: dict[str, STORAGE_TYPES] = {name: _tensor_entry(version, name) for name in version.keys()}
        entries.update((name, BytesStorageMetadata()) for name in extra["bytes"])
        meta = StorageMeta(checkpoint_id=self.checkpoint_id, load_id=self._load_id)
        return Metadata(entries, planner_data=extra["planner_data"], storage_meta=meta)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Does nothing: `read_metadata` has opened the version."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Records the number of the version that this rank has open."""
        _, version = self._open_version()
        return dataclasses.replace(plan, storage_data=int(version))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans unchanged.

        Raises:
            TssdValueError: the ranks have opened different versions, because one became visible in between.
        """
        versions = sorted({plan.storage_data for plan in plans})
        if len(versions) > 1:
            message, advice = f"ranks have opened versions {versions}", "load again, or say version="
            raise new_exception("invalid", "", message, None, advice, None, None, self._base_key)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the tensors of this rank in place, and loads its byte items.

        Raises:
            TssdError: as `Store.get_state_dict`.
        """
        store, version = self._open_version()
        byte_items = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        targets: list[tuple[ReadItem, torch.Tensor]] = []
        boxes: dict[str, list[_Box]] = {}
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                continue
            name = item.storage_index.fqn
            target = planner.resolve_tensor(item).detach()
            if target.shape != item.lengths:
                message = f"the tensor to fill has shape {tuple(target.shape)}, not {tuple(item.lengths)}"
                raise new_exception("invalid", "", message, name, None, None, None, version.key, int(version))
            targets.append((item, target))
            # A tensor has one chunk, so offsets in the chunk are offsets in the tensor.
            boxes.setdefault(name, []).append((target, item.storage_offsets))
        into = {
            name: _PartialTensor(its_boxes, torch.Size(version.get_slice(name).get_shape()))
            for name, its_boxes in boxes.items()
        }
        store.get_state_dict(version.key, into, version=version, strict=False, cast=True)
        for item, target in targets:
            planner.commit_tensor(item, target)
        names = [item.storage_index.fqn for item in byte_items]
        byte_values: dict[str, bytes] = store.get_state_dict(version.key, version=version, names=names)
        for item in byte_items:
            planner.load_bytes(item, io.BytesIO(byte_values[item.storage_index.fqn]))
        self._close()
        return _completed(None)

    def _open_version(self) -> tuple[Store, OpenVersion]:
        assert self._opened is not None, "read_metadata comes first"
        return self._opened

    def _close(self) -> None:
        if self._opened is not None:
            store, version = self._opened
            self._opened = None
            version.close()
            store.close()


def _read_extra_metadata(store: Store, version: OpenVersion) -> dict[str, Any]:
    try:
        return load(store.get(version.key, fqn=_METADATA_LEAF, version=version))
    except TssdKeyError:
        # A writer other than `TssdWriter` put the version.
        return {"bytes": [], "planner_data": None}


def _tensor_entry(version: OpenVersion, name: str) -> TensorStorageMetadata:
    tensor = version.get_slice(name)
    size = torch.Size(tensor.get_shape())
    properties = TensorProperties(dtype=getattr(torch, tensor.get_dtype()))
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(properties, size, [chunk])


# A part of a tensor, and its offsets in the tensor.
_Box = tuple[torch.Tensor, torch.Size]


class _PartialTensor(torch.Tensor):
    """A tensor of which only some boxes are local. It declares them by the chunk protocol of DCP."""

    _boxes: list[_Box]

    @staticmethod
    def __new__(cls, boxes: list[_Box], shape: torch.Size) -> _PartialTensor:
        local = boxes[0][0]
        tensor: _PartialTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device
        )
        tensor._boxes = boxes
        return tensor

    def __init__(self, boxes: list[_Box], shape: torch.Size) -> None:
        pass

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, local.shape) for local, offsets in self._boxes]

    def local_shards(self) -> list[torch.Tensor]:
        return [local for local, _ in self._boxes]

    # torch itself sets this for a subclass that defines `__torch_dispatch__`.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} of a tensor that is not all here")


def _completed(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
