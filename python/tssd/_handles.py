"""The other end of a pickled handle of a file: the process that opens the file again."""

from __future__ import annotations

from typing import Any

from ._errors import new_exception
from ._tssd import SafeSlice, safe_open


def reopen(
    filename: str, framework: Any, device: Any, backend: Any, verify: Any, fingerprint: bytes
) -> safe_open:
    """Opens the file of a handle that was pickled.

    Raises:
        TssdValueError: the path now leads to another file.
        TssdOSError: the file cannot be opened.
    """
    options = {} if device is None else {"device": device}
    handle = safe_open(filename, framework, backend=backend, verify=verify, **options)
    if handle._fingerprint() != fingerprint:
        message = "it is another file than the one whose handle was pickled"
        raise new_exception("FileReplaced", "", message, None, "open it, and pickle that handle", filename, None)
    return handle


def reopen_slice(name: str, *arguments: Any) -> SafeSlice:
    """As `reopen`, for the handle of one tensor."""
    return reopen(*arguments).get_slice(name)
