"""Checkpoints of `torch.distributed.checkpoint` in stores.

    dcp.save(state_dict, storage_writer=TssdWriter("checkpoints"))
    dcp.load(state_dict, storage_reader=TssdReader("checkpoints"))

A checkpoint is a version of a key: a flat state dict with a tensor for each fqn, which `Store.get_state_dict`
gives in whatever sharding is wanted. What is no tensor to DCP is there as bytes, which DCP alone reads.
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

from ._errors import TssdKeyError, make
from ._reports import PutReport
from ._tssd import OpenVersion, Store, load, save

__all__ = ["TssdReader", "TssdWriter"]

_PathOrUrl = str | os.PathLike[str]

# The leaf with what the index does not say: an archive that names the byte items and has what planners noted.
_NOTES = ".metadata"


class _Place:
    """Where checkpoints are: what writers and readers have in common."""

    def __init__(self, path_or_url: _PathOrUrl, key: str) -> None:
        self._path_or_url = os.fspath(path_or_url)
        self._name = key

    @property
    def checkpoint_id(self) -> str:
        """The directory, or the address of the store."""
        return self._path_or_url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _PathOrUrl) -> bool:
        """Whether it is the address of a store, or the path of what can be one."""
        return _is_url(os.fspath(checkpoint_id)) or FileSystemReader.validate_checkpoint_id(checkpoint_id)

    def _move(self, checkpoint_id: _PathOrUrl | None) -> None:
        if checkpoint_id:
            self._path_or_url = os.fspath(checkpoint_id)

    def _key(self, rank: int | None) -> str:
        """Ranks that save without collectives have a checkpoint each."""
        return self._name if rank is None else f"{self._name}/rank{rank}"


def _is_url(path_or_url: str) -> bool:
    buckets = ("abfs://", "abfss://", "az://", "azure://", "gs://", "s3://", "s3a://")
    return path_or_url.startswith(("file:", "memory:", "tcp:", "tls:", "unix:", *buckets))


@dataclasses.dataclass(frozen=True)
class _Part:
    """Which contribution to a version a rank makes."""

    job: str
    writer: int
    writers: int


class TssdWriter(_Place, StorageWriter):
    """Writes checkpoints of DCP: `dcp.save(state_dict, storage_writer=TssdWriter(path))`; `async_save`.

    Each save is a new version. Readers see it when all ranks have written it, and until then the one before.

    Args:
        path_or_url: a directory, which is made if need be, or an address that `tssd.Store` takes. The
            `checkpoint_id` of a save replaces it.
        key: the name of the checkpoint in that store.
        durability: as for `Store.put_state_dict`; a daemon has "disk" with a directory, and "object" with a bucket.
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
        self._last: _Part | None = None

    def reset(self, checkpoint_id: _PathOrUrl | None = None) -> None:
        """Begins another checkpoint."""
        self._move(checkpoint_id)
        self._save_id = uuid.uuid4().hex

    def storage_meta(self) -> StorageMeta:
        """What the planner is told about this writer."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learns whether the ranks save together."""
        self._rank = None if kwargs.get("use_collectives", True) else kwargs.get("rank")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is.

        Raises:
            TssdValueError: it stands for one that the planner has kept, or has an item named `.metadata`.
        """
        _prove_new([plan])
        if any(item.index.fqn == _NOTES for item in plan.items):
            message = "it is the name of what the checkpoint says of itself"
            raise make("invalid", "", message, _NOTES, "save the item under another name", None, None)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tells each rank which part of the version it writes. The last one is what `finish` puts.

        Raises:
            TssdValueError: a plan stands for one that the planner has kept.
        """
        _prove_new(plans)
        writers = len(plans) + 1
        job = uuid.uuid4().hex
        *parts, self._last = (_Part(job, writer, writers) for writer in range(writers))
        return [dataclasses.replace(plan, storage_data=part) for plan, part in zip(plans, parts)]

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
            # A shard stays one if it is all of the tensor: other ranks may have empty ones.
            if item.type is WriteItemType.SHARD:
                assert item.tensor_data is not None
                shapes[name] = item.tensor_data.size
                boxes.setdefault(name, []).append((leaves[name], item.tensor_data.chunk.offsets))
            results.append(WriteResult(item.index, size, None))
        leaves.update((name, _Sharded(its_boxes, shapes[name])) for name, its_boxes in boxes.items())
        self._put(leaves, plan.storage_data)
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Puts what the index of the version does not say, which makes it visible.

        Raises:
            TssdError: as `Store.put_state_dict`; or parts of the version are missing.
        """
        assert self._last is not None
        metadata.storage_meta = self.storage_meta()
        entries = metadata.state_dict_metadata.items()
        byte_items = [name for name, entry in entries if isinstance(entry, BytesStorageMetadata)]
        notes = {"bytes": byte_items, "planner_data": metadata.planner_data}
        report = self._put({_NOTES: save(notes)}, self._last)
        if not report.visible:
            message = f"version {report.version} lacks what ranks {report.missing} should have put"
            raise make("invalid", "", message, None, None, None, None, self._key(self._rank), report.version)

    def _put(self, leaves: dict[str, Any], part: _Part) -> PutReport:
        with Store(self._path_or_url) as store:
            report: PutReport = store.put_state_dict(
                leaves,
                self._key(self._rank),
                job=part.job,
                writer=part.writer,
                writers=part.writers,
                durability=self._durability,
            )
        return report


def _prove_new(plans: Iterable[SavePlan]) -> None:
    """A planner that keeps plans would give out what belongs to an earlier version."""
    if not all(getattr(plan, "usable", True) for plan in plans):
        message, advice = "the planner has kept its plan", "say enable_plan_caching=False"
        raise make("invalid", "", message, None, advice, None, None)


class TssdReader(_Place, StorageReader):
    """Reads checkpoints of DCP in any sharding: `dcp.load(state_dict, storage_reader=TssdReader(path))`.

    The tensors of what `Store.put_state_dict` put are read as well, by their fqns. Floating tensors are cast;
    others must have the dtype that is stored.

    Args:
        path_or_url: a directory, or an address that `tssd.Store` takes. The `checkpoint_id` of a load
            replaces it.
        key: the name of the checkpoint in that store.
        version: the number of the version; None: the newest.
    """

    def __init__(
        self, path_or_url: _PathOrUrl, key: str = "checkpoint", *, version: int | None = None
    ) -> None:
        super().__init__(path_or_url, key)
        self._version = version
        self._load_id = uuid.uuid4().hex
        self._opened: tuple[Store, OpenVersion] | None = None

    def reset(self, checkpoint_id: _PathOrUrl | None = None) -> None:
        """Begins another load."""
        self._move(checkpoint_id)
        self._load_id = uuid.uuid4().hex
        self._close()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint has. Each tensor is one chunk, however many ranks wrote it. The version is held
        until it has been read.

        Raises:
            TssdFileNotFoundError: there is no such directory.
            TssdKeyError: there is no such key or version.
        """
        self._close()
        path = self._path_or_url
        if not _is_url(path) and not os.path.isdir(path):
            # A store would make it.
            raise make("Io", "", "", None, None, path, errno.ENOENT)
        store = Store(path)
        version = store.open(self._key(kwargs.get("rank")), version=self._version)
        self._opened = store, version
        notes = _notes(store, version)
        entries: dict[str, STORAGE_TYPES] = {name: _tensor_entry(version, name) for name in version.keys()}
        entries.update((name, BytesStorageMetadata()) for name in notes["bytes"])
        meta = StorageMeta(checkpoint_id=self.checkpoint_id, load_id=self._load_id)
        return Metadata(entries, planner_data=notes["planner_data"], storage_meta=meta)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Does nothing: `read_metadata` has the version open."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Notes which version this rank has open."""
        _, version = self._held()
        return dataclasses.replace(plan, storage_data=int(version))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are.

        Raises:
            TssdValueError: a version became visible when some ranks had opened the one before.
        """
        versions = sorted({plan.storage_data for plan in plans})
        if len(versions) > 1:
            message, advice = f"ranks have opened versions {versions}", "load again, or say version="
            raise make("invalid", "", message, None, advice, None, None, self._name)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the tensors of this rank in place.

        Raises:
            TssdError: as `Store.get_state_dict`.
        """
        store, version = self._held()
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
                raise make("invalid", "", message, name, None, None, None, version.key, int(version))
            targets.append((item, target))
            # The one chunk of a tensor begins where the tensor does.
            boxes.setdefault(name, []).append((target, item.storage_offsets))
        into = {
            name: _Sharded(its_boxes, torch.Size(version.get_slice(name).get_shape()))
            for name, its_boxes in boxes.items()
        }
        store.get_state_dict(version.key, into, version=version, strict=False, cast=True)
        for item, target in targets:
            planner.commit_tensor(item, target)
        names = [item.storage_index.fqn for item in byte_items]
        stored: dict[str, bytes] = store.get_state_dict(version.key, version=version, names=names)
        for item in byte_items:
            planner.load_bytes(item, io.BytesIO(stored[item.storage_index.fqn]))
        self._close()
        return _done(None)

    def _held(self) -> tuple[Store, OpenVersion]:
        assert self._opened is not None, "read_metadata comes first"
        return self._opened

    def _close(self) -> None:
        if self._opened is not None:
            store, version = self._opened
            self._opened = None
            version.close()
            store.close()


def _notes(store: Store, version: OpenVersion) -> dict[str, Any]:
    try:
        return load(store.get(version.key, fqn=_NOTES, version=version))
    except TssdKeyError:
        # No writer of this module put it.
        return {"bytes": [], "planner_data": None}


def _tensor_entry(version: OpenVersion, name: str) -> TensorStorageMetadata:
    stored = version.get_slice(name)
    size = torch.Size(stored.get_shape())
    properties = TensorProperties(dtype=getattr(torch, stored.get_dtype()))
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(properties, size, [whole])


# A part of a tensor, and where it begins in it.
_Box = tuple[torch.Tensor, torch.Size]


class _Sharded(torch.Tensor):
    """A tensor of which some boxes are here: a leaf that says so by the protocol of DCP."""

    _boxes: list[_Box]

    @staticmethod
    def __new__(cls, boxes: list[_Box], shape: torch.Size) -> _Sharded:
        local = boxes[0][0]
        made: _Sharded = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device
        )
        made._boxes = boxes
        return made

    def __init__(self, boxes: list[_Box], shape: torch.Size) -> None:
        pass

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, local.shape) for local, offsets in self._boxes]

    def local_shards(self) -> list[torch.Tensor]:
        return [local for local, _ in self._boxes]

    # What torch makes of it by itself, where it has a dispatch of its own.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} of a tensor that is not all here")


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
