"""Fixtures of all tests. Tests that need torch are not collected if torch is not installed."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from s3 import HAS_MOTO, server

__all__ = ["server"]

collect_ignore = (
    []
    if importlib.util.find_spec("torch")
    else [
        "test_convert.py",
        "test_dcp.py",
        "test_delta.py",
        "test_distributed.py",
        "test_examples.py",
        "test_reference_readers.py",
        "test_store_ranks.py",
        "test_store_torch.py",
        "test_torch.py",
        "test_torch_pickle.py",
        "test_torchstore.py",
        "test_wrappers.py",
    ]
) + ([] if HAS_MOTO else ["test_bucket.py"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.tssd"


@pytest.fixture
def limit_file_size() -> Iterator[Callable[[int], None]]:
    """Returns a function that limits the size of files in bytes. A write beyond it fails, as on a full disk."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Prints the counts last, in the format of the project's other checks."""
    stats = config.pluginmanager.get_plugin("terminalreporter").stats
    failed = len(stats.get("failed", [])) + len(stats.get("error", []))
    print(f"{len(stats.get('passed', []))} passed, {failed} failed")


@pytest.fixture(autouse=True)
def sigint_raises() -> Iterator[None]:
    """Makes SIGINT raise `KeyboardInterrupt`, also if the tests run as a background job of a shell."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)
