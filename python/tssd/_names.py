"""Selection of leaves by name, with the patterns that shells use for file names."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import Any

from ._errors import TssdKeyError, new_exception
from ._tssd import _abridge as abridge


def matcher(patterns: Sequence[str]) -> Callable[[str], Any]:
    """Returns a function that tests whether an fqn matches any of the patterns. `*` also matches dots."""
    if isinstance(patterns, str):
        patterns = [patterns]
    return re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)").match


def match_names(fqns: list[str], names: Sequence[str]) -> list[bool]:
    """Returns for each fqn whether a name selects it.

    A name selects the fqn that equals it. If there is none, it selects all fqns below it. If there are none of these
    either, the name is a pattern: it selects all fqns that it matches, and all fqns below them.

    Raises:
        TssdKeyError: a name selects no fqn.
        TypeError: a name is not a str.
    """
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(abridge(f"a name is a str, not {name!r}"))
    fqn_set = set(fqns)
    exact = fqn_set.intersection(names)
    prefixes: list[str] = []
    patterns: list[str] = []
    for name in names:
        if name in exact:
            continue
        if any(fqn.startswith(f"{name}.") for fqn in fqns):
            prefixes.append(f"{name}.")
            continue
        # A pattern that matches a container selects everything in it.
        name_and_below = [name, f"{name}.*"]
        if not any(map(matcher(name_and_below), fqns)):
            advice = "`open(key).keys()` lists the tensors"
            error = new_exception("NotFound", "F-015", f"nothing is named {name!r}", name, advice, None, None)
            assert isinstance(error, TssdKeyError)
            raise error
        patterns += name_and_below
    matches, prefix_tuple = matcher(patterns), tuple(prefixes)
    return [fqn in exact or fqn.startswith(prefix_tuple) or matches(fqn) is not None for fqn in fqns]
