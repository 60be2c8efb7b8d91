"""Records of results: JSON lines, appended to the file that TSSD_BENCH_RECORDS names.

The performance page and its plots are generated from them.
"""

from __future__ import annotations

import json
import os
from typing import Any

FILE = "TSSD_BENCH_RECORDS"


def write(kind: str, record: dict[str, Any]) -> None:
    """Appends a record as one line, under its kind. Does nothing if no file is set."""
    path = os.environ.get(FILE)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            print(json.dumps({kind: round_floats(record)}), file=file)


def round_floats(value: Any) -> Any:
    """Returns a value with all floats rounded to six significant digits: more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: round_floats(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [round_floats(each) for each in value]
    return value
