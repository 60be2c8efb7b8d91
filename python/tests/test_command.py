"""The search for the command `tssd` by a client that starts a daemon."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tssd
from processes import stop_daemons
from tssd import _command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="daemons run on Linux")


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A runtime directory with a short path, because a socket's path has at most 108 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
        stop_daemons(Path(folder))


def make_python(folder: Path) -> Path:
    """Returns a Python whose folder the caller may add files to."""
    folder.mkdir(parents=True)
    python = folder / "python"
    python.symlink_to(Path(sys.executable).resolve())
    return python


def make_command(folder: Path) -> Path:
    """Returns the command that is under test, in a folder."""
    name = os.environ.get("TSSD_BIN") or shutil.which("tssd")
    assert name is not None
    folder.mkdir(parents=True, exist_ok=True)
    command = folder / "tssd"
    command.symlink_to(Path(name).resolve())
    return command


def connect(python: Path, runtime_dir: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Opens `unix:default` in a process of `python`, without any command on PATH."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TSSD_")}
    return subprocess.run(
        [python, "-c", "import tssd; print(tssd.Store('unix:default').keys())"],
        env=inherited
        | {"PATH": "/nowhere", "PYTHONPATH": path, "XDG_RUNTIME_DIR": str(runtime_dir)}
        | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_command_next_to_python_starts_daemon(tmp_path: Path, runtime_dir: Path) -> None:
    python = make_python(tmp_path / "venv/bin")
    make_command(tmp_path / "venv/bin")
    result = connect(python, runtime_dir)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr


def test_error_lists_where_command_was_sought(tmp_path: Path, runtime_dir: Path) -> None:
    python = make_python(tmp_path / "venv/bin")
    # A file without the right to execute it is no command.
    (tmp_path / "venv/bin/tssd").touch()
    # An installed wheel has the command next to the package; a copy of the package has none.
    package = tmp_path / "site/tssd"
    shutil.copytree(Path(tssd.__file__).parent, package)
    paths = [str(package.parent), *(entry for entry in sys.path if entry)]
    result = connect(python, runtime_dir, PYTHONPATH=os.pathsep.join(paths))
    error, help_line = result.stderr.splitlines()[-2:]
    assert f'cannot start the daemon "default": command "tssd" not found next to {python}' in error
    assert error.startswith("tssd._errors.TssdConnectionError: ") and error.endswith(" nor on PATH")
    # A folder is named whether it exists or not.
    assert f", in {package.parent / 'bin'}, in {package} nor" in error
    assert help_line == 'help: set TSSD_BIN to the command, or start "tssd serve --socket default"'


def test_error_names_missing_command_of_environment(tmp_path: Path, runtime_dir: Path) -> None:
    python = make_python(tmp_path / "venv/bin")
    make_command(tmp_path / "venv/bin")
    result = connect(python, runtime_dir, TSSD_BIN="/nowhere/tssd")
    error, help_line = result.stderr.splitlines()[-2:]
    assert 'cannot start the daemon "default": command "/nowhere/tssd" of TSSD_BIN not found' in error
    assert help_line.startswith("help: set TSSD_BIN")


def test_command_of_environment_comes_first(tmp_path: Path, runtime_dir: Path) -> None:
    python = make_python(tmp_path / "venv/bin")
    (tmp_path / "venv/bin/tssd").symlink_to("/bin/false")
    command = make_command(tmp_path / "other")
    result = connect(python, runtime_dir, TSSD_BIN=str(command))
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr


def test_search_covers_python_and_scripts_and_package(monkeypatch: pytest.MonkeyPatch) -> None:
    schemes = {None: "/opt/venv/bin", sysconfig.get_preferred_scheme("user"): "/home/user/.local/bin"}
    monkeypatch.setattr(sysconfig, "get_path", lambda _name, scheme=None: schemes[scheme])
    monkeypatch.setattr(sys, "executable", "/opt/venv/bin/python")
    monkeypatch.setattr(_command, "__file__", "/srv/app/tssd/_command.py")
    monkeypatch.setattr(_command, "_FOLDERS", _command._folders())
    package = ["/home/user/.local/bin", "/srv/app/bin", "/srv/app/tssd"]
    # The scripts folder is the folder of Python: it is named once.
    assert _command.search_paths() == ["/opt/venv/bin/python", *package]
    # A Python that is embedded in a program has no executable.
    for executable in ("", None):
        monkeypatch.setattr(sys, "executable", executable)
        assert _command.search_paths() == ["/opt/venv/bin", *package]
