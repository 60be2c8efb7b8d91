"""The search for the command `tssd` of this installation."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig


def _folders() -> list[str]:
    package = os.path.dirname(os.path.abspath(__file__))
    folders = [sysconfig.get_path("scripts")]
    # `pip install --user`. A system without home folders has no such scheme.
    with contextlib.suppress(AttributeError, KeyError):
        folders.append(sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user")))
    # `pip install --target`
    return [*folders, os.path.join(os.path.dirname(package), "bin"), package]


# Found on import, because `sysconfig` initializes itself wrongly if several threads use it first at the same time.
_FOLDERS = _folders()


def search_paths() -> list[str]:
    """Returns where the command may be, in order: the Python that it is next to, then folders that it is in.

    An installer puts the command into the scripts folder, which need not be on PATH: a kernel of Jupyter, a systemd
    unit or a launcher runs Python by its full path.
    """
    paths = [sys.executable] if sys.executable else []
    seen = {os.path.dirname(path) for path in paths}
    for folder in _FOLDERS:
        if folder not in seen:
            seen.add(folder)
            paths.append(folder)
    return paths
