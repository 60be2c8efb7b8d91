"""The search for the command `tssd` of this installation."""

from __future__ import annotations

import os
import sys
import sysconfig


def search_paths() -> list[str]:
    """Returns where the command may be, in order: the Python that it is next to, then folders that it is in.

    An installer puts the command into the scripts folder, which need not be on PATH: a kernel of Jupyter, a systemd
    unit or a launcher runs Python by its full path.
    """
    package = os.path.dirname(os.path.abspath(__file__))
    folders = [
        sysconfig.get_path("scripts"),
        # `pip install --user`
        sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user")),
        # `pip install --target`
        os.path.join(os.path.dirname(package), "bin"),
        package,
    ]
    paths = [sys.executable] if sys.executable else []
    seen = {os.path.dirname(path) for path in paths}
    for folder in folders:
        if folder not in seen:
            seen.add(folder)
            paths.append(folder)
    return paths
