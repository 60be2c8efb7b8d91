"""What is measured, as JSON lines at the end of the file that TSSD_BENCH_RECORDS names. The page and its
plots are made from them."""

from __future__ import annotations

import json
import os
from typing import Any

FILE = "TSSD_BENCH_RECORDS"


def write(kind: str, record: dict[str, Any]) -> None:
    """One line: the record under its kind. Without a file to write to, nothing happens."""
    path = os.environ.get(FILE)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            print(json.dumps({kind: rounded(record)}), file=file)


def rounded(value: Any) -> Any:
    """The same with six digits in each number: more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return value
