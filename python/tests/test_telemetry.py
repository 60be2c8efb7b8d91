"""Records of weight updates, and their adapters with the real packages."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import tssd
from tssd import telemetry
from tssd._sync import report_sync

RECORD = tssd.SyncRecord(
    key="policy",
    version=7,
    role="vllm worker",
    source="unix:rl",
    bytes_needed=100,
    bytes_received=0,
    stage_seconds=0.25,
    commit_seconds=0.5,
)


def test_record_is_logged_and_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tssd.SyncRecord] = []

    def fail(record: tssd.SyncRecord) -> None:
        raise RuntimeError("the dashboard is down")

    ends = [tssd.on_sync(fail), tssd.on_sync(seen.append)]
    with caplog.at_level(logging.INFO, "tssd.sync"):
        report_sync(RECORD)
    assert seen == [RECORD]
    assert caplog.messages[0] == (
        "key=policy version=7 role=vllm worker source=unix:rl bytes_needed=100 bytes_received=0 "
        "stage_seconds=0.2500 commit_seconds=0.5000"
    )
    assert caplog.messages[1] == "a callback of on_sync failed"
    assert vars(caplog.records[0])["tssd"]["stage_seconds"] == 0.25
    for end in (*ends, *ends):
        end()
    report_sync(RECORD)
    assert seen == [RECORD]
    assert RECORD.metrics() == {
        "tssd/version": 7,
        "tssd/vllm worker/bytes_needed": 100,
        "tssd/vllm worker/bytes_received": 0,
        "tssd/vllm worker/stage_seconds": 0.25,
        "tssd/vllm worker/commit_seconds": 0.5,
    }


def test_opentelemetry_has_a_histogram_of_each_number() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    end = telemetry.to_opentelemetry(sdk.MeterProvider([reader]).get_meter("tssd"))
    report_sync(RECORD)
    report_sync(RECORD)
    end()
    report_sync(RECORD)
    data = reader.get_metrics_data()
    assert data is not None
    found: dict[str, Any] = {
        metric.name: (metric.unit, metric.data.data_points[0])
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
    }
    assert found.keys() == {
        f"tssd.sync.{name}" for name in ("bytes_needed", "bytes_received", "stage_seconds", "commit_seconds")
    }
    unit, point = found["tssd.sync.commit_seconds"]
    assert (unit, point.count, point.sum) == ("s", 2, 1.0)
    assert dict(point.attributes) == {"tssd.key": "policy", "tssd.role": "vllm worker"}
    assert found["tssd.sync.bytes_needed"][0] == "By"


def test_wandb_has_a_line_for_each_record(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    run = wandb.init(mode="offline", dir=str(tmp_path), project="test")
    end = telemetry.to_wandb(run)
    report_sync(RECORD)
    report_sync(dataclasses.replace(RECORD, role="trainer", stage_seconds=9.0))
    assert run.summary["tssd/vllm worker/stage_seconds"] == 0.25 and run.summary["tssd/version"] == 7
    assert run.summary["tssd/trainer/stage_seconds"] == 9.0
    end()
    run.finish()
