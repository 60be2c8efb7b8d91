"""Logging of a program that uses torchstore."""

from __future__ import annotations

import logging
import os
import sys


def init_logging() -> None:
    """Makes the root logger write to stdout. The level is TORCHSTORE_LOG_LEVEL; without it, INFO."""
    level = os.environ.get("TORCHSTORE_LOG_LEVEL", "INFO").upper()
    logging.root.setLevel(level)
    handlers = (each for each in logging.root.handlers if isinstance(each, logging.StreamHandler))
    if all(each.stream is not sys.stdout for each in handlers):
        handler = logging.StreamHandler(sys.stdout)
        handler.setLevel(level)
        logging.root.addHandler(handler)
