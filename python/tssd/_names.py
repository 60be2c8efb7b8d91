"""Patterns of names: those that a shell has for files."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import Any

from ._errors import TssdKeyError, make


def matcher(patterns: Sequence[str]) -> Callable[[str], Any]:
    """What says whether an fqn matches one of the patterns: `*` stands for dots too."""
    if isinstance(patterns, str):
        patterns = [patterns]
    return re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)").match


def chosen(fqns: list[str], names: Sequence[str]) -> list[bool]:
    """Which fqns are named: as they are, by what they are in, or by a pattern.

    Raises:
        TssdKeyError: a name is that of none.
    """
    if isinstance(names, str):
        names = [names]
    known = set(fqns)
    exact = known.intersection(names)
    patterns = [[name, f"{name}.*"] for name in names if name not in exact]
    for pattern, inside in patterns:
        if not any(map(matcher([pattern, inside]), fqns)):
            advice = "`open(key).keys()` lists the tensors"
            error = make("NotFound", "F-015", f"nothing is named {pattern!r}", pattern, advice, None, None)
            assert isinstance(error, TssdKeyError)
            raise error
    matches = matcher([each for pair in patterns for each in pair])
    return [fqn in exact or matches(fqn) is not None for fqn in fqns]
