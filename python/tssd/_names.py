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
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"a name is a str, not {name!r}")
    known = set(fqns)
    exact = known.intersection(names)
    inside: list[str] = []
    patterns: list[str] = []
    for name in names:
        if name in exact:
            continue
        if any(fqn.startswith(f"{name}.") for fqn in fqns):
            inside.append(f"{name}.")
            continue
        # What is in something that a pattern names is named, too.
        both = [name, f"{name}.*"]
        if not any(map(matcher(both), fqns)):
            advice = "`open(key).keys()` lists the tensors"
            error = make("NotFound", "F-015", f"nothing is named {name!r}", name, advice, None, None)
            assert isinstance(error, TssdKeyError)
            raise error
        patterns += both
    matches, starts = matcher(patterns), tuple(inside)
    return [fqn in exact or fqn.startswith(starts) or matches(fqn) is not None for fqn in fqns]
