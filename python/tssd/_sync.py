"""Records of weight updates, for logs and dashboards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass

_logger = logging.getLogger("tssd.sync")


@dataclass(frozen=True, kw_only=True)
class SyncRecord:
    """One part of a weight update, as one process saw it.

    A trainer rank reports its put, a worker of an engine its stage and its commit, and the process that drives the
    engine the pause. All times are in seconds; None: this process does not know it.

    Attributes:
        key: the key of the weights.
        version: the version number.
        role: the process: "trainer", "vllm worker", "vllm engine", or "vllm worker 0" and so on as the trainer sees it;
            "verl actor" or "verl rollout".
        source: the address of the store.
        bytes_needed: the bytes of the tensors that the process puts or needs.
        bytes_received: the bytes that came over a connection.
        put_seconds: the time of the put.
        stage_seconds: the time until the bytes were on the host, verified. The engine serves meanwhile.
        commit_seconds: the time to install the version, `process_seconds` included.
        process_seconds: the time of the engine's own post-processing.
        pause_seconds: the time for which the engine did not serve.
    """

    key: str
    version: int
    role: str
    source: str
    bytes_needed: int | None = None
    bytes_received: int | None = None
    put_seconds: float | None = None
    stage_seconds: float | None = None
    commit_seconds: float | None = None
    process_seconds: float | None = None
    pause_seconds: float | None = None

    def metrics(self) -> dict[str, float]:
        """Returns the numbers of the record by role and name, for a dashboard: "tssd/trainer/put_seconds" and so on.

        The version number is "tssd/version".
        """
        metrics: dict[str, float] = {"tssd/version": self.version}
        for name, value in asdict(self).items():
            if name != "version" and isinstance(value, (int, float)):
                metrics[f"tssd/{self.role}/{name}"] = value
        return metrics


_callbacks: list[Callable[[SyncRecord], None]] = []


def on_sync(callback: Callable[[SyncRecord], None]) -> Callable[[], None]:
    """Calls a function with each SyncRecord of this process, on the thread that made it.

    An exception of the function is logged, and does not disturb the update.

    Returns:
        A function that removes the callback.

    `tssd.telemetry` has adapters for Weights & Biases and OpenTelemetry.

    Example:
        `on_sync(lambda record: print(record.version, record.stage_seconds))`
    """
    _callbacks.append(callback)
    return lambda: _callbacks.remove(callback) if callback in _callbacks else None


def report_sync(record: SyncRecord) -> None:
    """Logs a record to the logger "tssd.sync", and passes it to the callbacks."""
    known = {name: value for name, value in asdict(record).items() if value is not None}
    text = " ".join(
        f"{name}={value:.4f}" if isinstance(value, float) else f"{name}={value}" for name, value in known.items()
    )
    _logger.info(text, extra={"tssd": known})
    for callback in list(_callbacks):
        try:
            callback(record)
        except Exception:
            _logger.exception("a callback of on_sync failed")
