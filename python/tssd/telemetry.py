"""Adapters that pass the records of weight updates on: to Weights & Biases, and to OpenTelemetry.

    import tssd.telemetry, wandb
    tssd.telemetry.to_wandb(wandb.init(project="rl"))

Neither package is needed unless its adapter is called. Other systems take the records from `tssd.on_sync`, or from the
logger `tssd.sync`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from ._sync import SyncRecord, on_sync

__all__ = ["to_opentelemetry", "to_wandb"]


def to_wandb(run: Any) -> Callable[[], None]:
    """Logs the numbers of each SyncRecord of this process to a run: "tssd/trainer/put_seconds" and so on.

    Their x-axis is "tssd/version".

    Args:
        run: a run of Weights & Biases.

    Returns:
        A function that ends it.
    """
    run.define_metric("tssd/*", step_metric="tssd/version")
    return on_sync(lambda record: run.log(record.metrics()))


def to_opentelemetry(meter: Any = None) -> Callable[[], None]:
    """Records the numbers of each SyncRecord of this process as histograms: "tssd.sync.stage_seconds" and so on.

    The attributes are the key and the role, "tssd.key" and "tssd.role".

    Args:
        meter: a meter of OpenTelemetry. None: that of the global provider, named "tssd".

    Returns:
        A function that ends it.
    """
    if meter is None:
        from opentelemetry import metrics

        meter = metrics.get_meter("tssd")
    histograms = {}
    for field in fields(SyncRecord):
        if field.name.startswith("bytes_"):
            histograms[field.name] = meter.create_histogram(f"tssd.sync.{field.name}", unit="By")
        elif field.name.endswith("_seconds"):
            histograms[field.name] = meter.create_histogram(f"tssd.sync.{field.name}", unit="s")

    def record_all(record: SyncRecord) -> None:
        attributes = {"tssd.key": record.key, "tssd.role": record.role}
        for name, histogram in histograms.items():
            value = getattr(record, name)
            if value is not None:
                histogram.record(value, attributes)

    return on_sync(record_all)
