"""The worker side of the weight-transfer backend "tssd"."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from vllm.distributed.parallel_state import get_tp_group, get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

import tssd

from .._sync import SyncRecord, report_sync
from ._installer import Installer, Staged

logger = init_logger(__name__)

# A commit that fails is repeated from the memory of the host, this many times in all.
COMMIT_ATTEMPTS = 2


def acknowledgement_key(key: str, token: str) -> str:
    """Returns the key under which the workers of one engine report what they have staged."""
    return f"{key}.staged.{token}"


def acknowledgement(staged: Staged | None, error: BaseException | None) -> dict[str, Any]:
    """Returns what a worker reports to the trainer: the numbers of a staging, or its error."""
    if staged is None:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "bytes_needed": staged.bytes_needed,
        "bytes_received": staged.bytes_received,
        "stage_seconds": staged.stage_seconds,
        "whole_names": len(staged.whole),
    }


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What a worker needs to reach the weights.

    Attributes:
        store: the address of the store, as for `tssd.Store`.
        key: the key of the weights.
        token: the name under which the workers report to the trainer what they have staged. Empty: they do not.
        timeout: how many seconds a worker waits for a version, and for its bytes.
    """

    store: str
    key: str
    token: str = ""
    timeout: float = 300.0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One step of an update.

    Attributes:
        version: the version number. None: the newest version.
        stage_only: whether to bring the bytes to this host in the background, and leave the model as it is. The call
            does not wait: the version must be visible.
        attempt: the number of the report to the trainer, a new one for each call with `stage_only`.
    """

    version: int | None = None
    stage_only: bool = False
    attempt: int = 0


class TransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Pulls exactly the shard of its worker from a store.

    An update can have two steps, each in a session of its own: with `stage_only`, while the engine serves, and then
    without it, in a pause. If the first is left out, the second does both.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    # What the draft model takes is not recorded.
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._installer = Installer(model, self.model_config, device)
        self._store: tssd.Store | None = None
        self._info: InitInfo | None = None
        self._staging: _Staging | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Connects to the store. If the key has a version, records what the model takes from it."""
        self._run_on_all_workers(lambda: self._connect(init_info))

    def _connect(self, init_info: InitInfo) -> None:
        if getattr(self.parallel_config, "enable_eplb", False):
            # The recording has the place of each expert.
            raise ValueError('the backend "tssd" does not support EPLB, which moves experts: set enable_eplb=False')
        self.shutdown()
        self._store = tssd.Store(init_info.store, connect_timeout=min(init_info.timeout, 30.0))
        self._info = init_info
        if self._store.exists(init_info.key):
            with self._store.open(init_info.key, timeout=init_info.timeout) as version:
                self._installer.prepare(version)

    def start_weight_update(self) -> None:
        """Does nothing: the parameters are written at once."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Stages a version, or installs it."""
        number = self._newest_version() if update_info.version is None else update_info.version
        if number is None:
            return
        if update_info.stage_only and self._acknowledges(update_info.attempt):
            # The trainer reads the error of each worker from the store. Servers would not pass on its text.
            try:
                self._begin_staging(number, update_info.attempt)
            except Exception as error:
                logger.exception("Version %d cannot be staged", number)
                self._acknowledge(update_info.attempt, None, error)
        elif update_info.stage_only:
            self._run_on_all_workers(lambda: self._begin_staging(number, 0))
        # No worker commits before all have staged, and none releases the version before all have committed: the engine
        # must not have two versions.
        elif self._run_on_all_workers(lambda: self._stage(number)) and self._run_on_all_workers(self._commit):
            self._discard()

    def finish_weight_update(self) -> None:
        """Does nothing: the parameters are complete."""

    def shutdown(self) -> None:
        """Releases the staged version, and disconnects."""
        self._discard()
        if self._store is not None:
            self._store.close()
        self._store = None

    def _group(self) -> Any:
        """Returns the group of the workers of this engine."""
        # With data parallelism, each replica has an executor of its own, and the world has all replicas.
        return get_world_group() if self.parallel_config.data_parallel_size == 1 else get_tp_group()

    def _newest_version(self) -> int | None:
        """Returns the number of the newest version, the same on all workers. None: the first worker finds none."""
        group = self._group()
        newest: list[int | None] = [None]

        def find() -> None:
            store, info = self._connected()
            if group.rank_in_group == 0:
                head = store.head(info.key)
                if head is None:
                    raise LookupError(f"key `{info.key}` has no version")
                newest[0] = head.version

        if not self._run_on_all_workers(find):
            return None
        if group.world_size > 1:
            torch.distributed.broadcast_object_list(newest, src=group.ranks[0], group=group.cpu_group)
        return newest[0]

    def _run_on_all_workers(self, step: Callable[[], None]) -> bool:
        """Runs a step. If it fails on any worker, the update has failed, and the last worker raises the errors of all.

        Returns whether it has succeeded on all workers.

        The executor of vLLM 0.32 and 0.33 reads the replies of the workers in order, and stops at the first failure.
        The replies of the later workers would then be taken for those of the next call. So only the last worker raises.
        """
        failure: BaseException | None = None
        try:
            step()
        except Exception as error:
            failure = error
        group = self._group()
        if group.world_size == 1:
            if failure is not None:
                raise failure
            return True
        errors: list[str | None] = [None] * group.world_size
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        torch.distributed.all_gather_object(errors, text, group=group.cpu_group)
        failed = [f"worker {rank}: {error}" for rank, error in enumerate(errors) if error is not None]
        if not failed:
            return True
        if failure is not None:
            logger.error("weight update failed: %s", text)
        if group.rank_in_group == group.world_size - 1:
            raise RuntimeError("; ".join(failed)) from failure
        _end_session(self)
        return False

    def _connected(self) -> tuple[tssd.Store, InitInfo]:
        if self._store is None or self._info is None:
            raise RuntimeError("call init_weight_transfer_engine first: the engine does not know the store")
        return self._store, self._info

    def _discard(self) -> None:
        if self._staging is not None:
            self._staging.discard()
        self._staging = None

    def _open(self, number: int) -> tssd.OpenVersion:
        store, info = self._connected()
        # It may not be visible yet, if another trainer rank has not committed its part.
        version = store.wait_for_version(info.key, number, timeout=info.timeout)
        if version.version == number:
            return version
        version.close()
        return store.open(info.key, version=number, timeout=info.timeout)

    def _acknowledges(self, attempt: int) -> bool:
        """Returns whether the workers report to the trainer what they have staged."""
        _, info = self._connected()
        return bool(info.token and attempt)

    def _begin_staging(self, number: int, attempt: int, waits: bool = False) -> None:
        store, info = self._connected()
        self._discard()
        # The engine does not serve during this call. So a version that is staged ahead must be there.
        version = self._open(number) if waits else store.open(info.key, version=number, timeout=info.timeout)
        # The worker runs one call at a time, so the model does not run now. Later, it may.
        self._installer.prepare(version)
        acknowledge = functools.partial(self._acknowledge, attempt) if self._acknowledges(attempt) else None
        self._staging = _Staging(self._installer, store, version, info.timeout, acknowledge)

    def _acknowledge(self, attempt: int, staged: Staged | None, error: BaseException | None) -> None:
        """Tells the trainer that the worker has staged a version, or why not.

        Does not raise: the other workers would go on without this one. The trainer's `stage` fails after its timeout.
        """
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        workers = parallel.data_parallel_size * parallel.world_size
        try:
            store, info = self._connected()
            store.put_state_dict(
                {f"worker {rank}": acknowledgement(staged, error)},
                acknowledgement_key(info.key, info.token),
                version=attempt,
                writers=workers,
                writer=rank,
                job=info.token,
                timeout=info.timeout,
            )
        except Exception:
            logger.exception("The trainer was not told what worker %d has staged", rank)

    def _stage(self, number: int) -> None:
        """Waits until a version is staged. Begins to stage it, unless that was done before."""
        _, info = self._connected()
        if self._staging is None or self._staging.version.version != number:
            self._begin_staging(number, attempt=0, waits=True)
        assert self._staging is not None
        try:
            self._staging.result(info.timeout)
        except BaseException:
            # The next call begins again.
            self._discard()
            raise

    def _commit(self) -> None:
        """Installs the version that is staged."""
        store, info = self._connected()
        assert self._staging is not None
        staged = self._staging.result(info.timeout)
        started = time.monotonic()
        for attempt in range(1, COMMIT_ATTEMPTS + 1):
            try:
                process_seconds = self._installer.commit(staged)
                break
            except Exception:
                # The parameters are partly those of the new version. The staged bytes are still there.
                if attempt == COMMIT_ATTEMPTS:
                    raise
                logger.exception("The commit of version %d failed, and is repeated", staged.version.version)
        report_sync(
            SyncRecord(
                key=info.key,
                version=staged.version.version,
                role="vllm worker",
                source=store.url,
                bytes_needed=staged.bytes_needed,
                bytes_received=staged.bytes_received,
                stage_seconds=staged.stage_seconds,
                commit_seconds=time.monotonic() - started,
                process_seconds=process_seconds,
            )
        )


def _end_session(engine: TransferEngine) -> None:
    """Ends the update session of the worker that has called the engine, as an exception would."""
    frame = inspect.currentframe()
    while frame is not None:
        worker: Any = frame.f_locals.get("self")
        if worker is not engine and getattr(worker, "weight_transfer_engine", None) is engine:
            worker._weight_update_active = False
        frame = frame.f_back
    engine.reset_weight_update_target()


class _Staging:
    """The staging of a version, on a thread of its own.

    `acknowledge` is called at its end, with the result or the error.
    """

    def __init__(
        self,
        installer: Installer,
        store: tssd.Store,
        version: tssd.OpenVersion,
        timeout: float,
        acknowledge: Callable[[Staged | None, BaseException | None], None] | None,
    ) -> None:
        self.version = version
        self._timeout = timeout
        self._installer, self._store, self._acknowledge = installer, store, acknowledge
        self._staged: Staged | None = None
        self._error: BaseException | None = None
        self._is_discarded = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="tssd-stage", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        staged = None
        try:
            staged = self._installer.stage(self._store, self.version, self._timeout)
        except BaseException as error:
            self._error = error
        with self._lock:
            if self._is_discarded:
                (staged or self.version).close()
                return
            self._staged = staged
        if self._acknowledge is not None:
            self._acknowledge(staged, self._error)

    def result(self, timeout: float) -> Staged:
        """Waits for the staging."""
        self._thread.join(timeout)
        if self._error is not None:
            raise self._error
        if self._staged is None:
            raise TimeoutError(f"version {self.version.version} was not staged within {timeout} seconds")
        return self._staged

    def discard(self) -> None:
        """Releases the version. A thread that still stages it releases it when it ends."""
        with self._lock:
            self._is_discarded = True
            staged, self._staged = self._staged, None
            has_failed = self._error is not None
        if staged is not None or has_failed:
            (staged or self.version).close()
