"""Runs a script in several processes: python fork_ranks.py SCRIPT FOLDER RANKS [ARGUMENT ...].

Each process has its rank as the third argument of the script, and writes its output to FOLDER/RANK.log. They are forked
after the imports that take most of the time of a rank. If one fails, the others are killed.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback

import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401


def run_rank(script: str, folder: str, count: str, rank: int, arguments: list[str]) -> int:
    log = os.open(os.path.join(folder, f"{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = [script, folder, count, str(rank), *arguments]
    sys.path[0] = os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> int:
    script, folder, count, *arguments = sys.argv[1:]
    ranks: dict[int, int] = {}
    for rank in range(int(count)):
        process = os.fork()
        if process == 0:
            code = run_rank(script, folder, count, rank, arguments)
            sys.stdout.flush()
            sys.stderr.flush()
            # The exit handlers of a script run too.
            sys.exit(code)
        ranks[process] = rank
    while ranks:
        process, status = os.wait()
        rank = ranks.pop(process)
        if status != 0:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            print(rank)
            return 1
    return 0


sys.exit(main())
