"""Saves and loads tensors of one element with torch.distributed.checkpoint, once for each line on stdin.

Usage: python dcp_peer.py FOLDER COUNT < NAMES

The first COUNT lines are the names of the tensors. For each line after them the tensors are saved in
FOLDER and loaded into others, in this process alone, and the answer is one line: the seconds that took.
`cargo xtask bench format` lets it take turns with us.
"""

import contextlib
import io
import pathlib
import shutil
import sys
import time
import warnings

import torch
import torch.distributed.checkpoint as dcp


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    folder, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    names = [sys.stdin.readline().rstrip("\n") for _ in range(count)]
    # torch warns that there is no process group, which is what is meant here.
    warnings.simplefilter("ignore")
    saved = {name: torch.tensor([1.5]) for name in names}
    for _ in sys.stdin:
        shutil.rmtree(folder, ignore_errors=True)
        loaded = {name: torch.zeros(1) for name in names}
        with contextlib.redirect_stdout(io.StringIO()):
            start = time.perf_counter()
            dcp.save(saved, storage_writer=writer(folder), no_dist=True)
            dcp.load(loaded, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
            seconds = time.perf_counter() - start
        if any(tensor.item() != 1.5 for tensor in loaded.values()):
            raise ValueError("what was loaded is not what was saved")
        print(seconds, flush=True)
    return 0


def writer(folder: pathlib.Path) -> dcp.FileSystemWriter:
    # Nobody else syncs to the disk here.
    return dcp.FileSystemWriter(folder, sync_files=False)


if __name__ == "__main__":
    sys.exit(main())
