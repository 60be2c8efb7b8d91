"""Races of the Python package, as a user has it, with what they would use without it.

A table is printed for each race; a figure is the median of its rounds, a ratio says how many times as fast ours
was. Whoever takes part does so in turns, so that what else the machine does slows all alike.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import fits
import nested
import records
import reshard
import safetensors
import store
import tiny
import torch
import tssd
from files import Files
from model import like, named
from pair import Pair
from peer import TORCHSTORE, Peer, torchstore
from race import Rounds
from store import Stores

CASES = {
    "put": "a state dict put in a store",
    "get": "got into tensors that are there",
    "views": "got as views of the store's memory, and read",
    "single": "400 tensors put and got one by one",
    "save": "a file of all, on the disk or not when it returns",
    "load": "all of a file",
    "one": "one tensor of a file",
    "slice": "a part of one tensor of a file",
    "verify": "all checksums of a file",
    "zstd": "a compressed file",
    "nested": "what a training with AdamW saves",
    "tiny": "up to 20,000 tensors of one element",
    "reshard": "from some ranks to others with another sharding",
    "fits": "what an operation costs by itself, for each tensor and each byte",
}
SHAPE = "shape:qwen3-0.6b"
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
#: So much of the model is in files, unless another model or size is named.
FILES = 600_000_000
#: Of an optimizer's state dict the weights are a fifth.
NESTED = 100_000_000
#: To compress takes a second for each so many bytes.
ZSTD = 60_000_000


def main() -> None:
    options = parsed()
    warnings.simplefilter("ignore")
    rounds = Rounds(options.iterations, options.warmup)
    chosen = [case for case in CASES if wants(options.cases, case)]
    if not chosen:
        print(f"python: no case has {' or '.join(options.cases)} in its name, only {', '.join(CASES)}")
        return
    versions = {
        "tssd": tssd.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
        "torchstore": version_of_torchstore(),
    }
    asked = {name: getattr(options, name) for name in ("model", "iterations", "warmup", "size")}
    records.write("suite", {"name": "python", "versions": versions, "options": asked})
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"{torch.get_num_threads()} threads\n")
    start = time.monotonic()
    if "reshard" in chosen:
        # Many processes: before this one and its peers have memory of their own.
        reshard.reshard(rounds, options.size)
    with torchstore() as peer:
        in_the_store(options, chosen, rounds, peer)
    # Files want memory too: what is written waits for the disk sooner where others have it.
    in_files(options, chosen, rounds)
    with torchstore() as peer:
        in_both(options, chosen, rounds, peer)
    print(f"{time.monotonic() - start:.0f} seconds")


def in_the_store(
    options: argparse.Namespace, chosen: list[str], rounds: Rounds, peer: Peer | None
) -> None:
    cases = {"put": Stores.put, "get": Stores.get, "views": Stores.view}
    firsts = {"put": Stores.first_put, "get": Stores.first_get}
    words = [options.model]
    if options.model == SHAPE:
        words.append(f"uniform:400:{min(536_870_912, options.size or 536_870_912)}")
    for word in words if set(cases) & set(chosen) else []:
        model = named(word, options.size)
        with ExitStack() as stack:
            pair = stack.enter_context(Pair(model, like(model.state)))
            # What goes by RPC takes long: the last model is enough.
            far = stack.enter_context(torchstore("MonarchRPC")) if word == words[-1] else None
            stores = Stores(pair, rounds, (peer, far), options.size)
            for case in chosen:
                if case in cases:
                    cases[case](stores)
                if case in firsts:
                    firsts[case](stores)
    if "single" in chosen:
        store.single(rounds, peer)


def in_files(options: argparse.Namespace, chosen: list[str], rounds: Rounds) -> None:
    cases = {
        "save": Files.save,
        "load": Files.load,
        "one": Files.tensor,
        "slice": Files.part,
        "verify": Files.verify,
    }
    if set(cases) & set(chosen):
        with folder() as at:
            most = FILES if options.model == SHAPE else None
            files = Files(at, named(options.model, options.size or most), rounds)
            for case in chosen:
                if case in cases:
                    cases[case](files)
    if "zstd" in chosen:
        with folder() as at:
            Files(at, named(options.model, min(ZSTD, options.size or ZSTD)), rounds).zstd()


def in_both(
    options: argparse.Namespace, chosen: list[str], rounds: Rounds, peer: Peer | None
) -> None:
    with folder() as at:
        if "nested" in chosen:
            size = min(NESTED, options.size or NESTED)
            model = named(f"adamw:{options.model}", size)
            nested.files(at, model, rounds)
            nested.store(model, rounds, peer, size)
        if "tiny" in chosen:
            tiny.files(at, rounds)
            tiny.store(rounds, peer)
        if "fits" in chosen:
            # Four points each, of which a line is made: fewer rounds are enough.
            with torchstore("MonarchRPC") as far:
                fits.fits(at, rounds.at_most(3), peer, far, options.size)


@contextmanager
def folder() -> Iterator[Path]:
    """A new one, where TMPDIR says."""
    path = Path(tempfile.mkdtemp())
    try:
        yield path
    finally:
        shutil.rmtree(path)


def version_of_torchstore() -> str:
    """That of its package, and the commit if it was installed from a clone."""
    python = os.environ.get(TORCHSTORE)
    if not python:
        return "not importable"
    script = (
        "import importlib.metadata, json, pathlib, subprocess\n"
        "found = importlib.metadata.distribution('torchstore')\n"
        "about = json.loads(found.read_text('direct_url.json') or '{}')\n"
        "commit = about.get('vcs_info', {}).get('commit_id', '')[:7]\n"
        "folder = about.get('url', '').removeprefix('file://')\n"
        "if not commit and folder.startswith('/') and pathlib.Path(folder).is_dir():\n"
        "    command = ['git', '-C', folder, 'rev-parse', '--short', 'HEAD']\n"
        "    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()\n"
        "print(found.version, commit)\n"
    )
    command = [python, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "not importable"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="cases:\n"
        + "\n".join(f"  {name:<10} {what}" for name, what in CASES.items())
        + f"""

environment:
  TSSD_BIN                the command that serves a store (else the one that PATH has)
  {TORCHSTORE}   a Python that can import torchstore, which takes part then
  {records.FILE}      a file to whose end the results are written, as JSON lines
  TMPDIR                  where files are written: the disk that is measured""",
    )
    parser.add_argument(
        "--model",
        default=SHAPE,
        metavar="DIR|shape:NAME",
        help="a folder of *.safetensors, or a model of tests/shapes.json (%(default)s)",
    )
    parser.add_argument("--iterations", type=positive, default=5, help="rounds that count (%(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before, which do not (%(default)s)")
    parser.add_argument("--size", type=size, help="of the model only so many whole layers, such as 600MB")
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help="what is measured: cases with one of these words in their names, or all"
    )
    return parser.parse_args()


def wants(words: list[str], case: str) -> bool:
    """As in the suites in Rust."""
    return not words or any(word in case for word in words)


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def size(text: str) -> int:
    """1,000 bytes are a kilobyte."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMG]B)?", text.upper())
    if found is None:
        raise ValueError(text)
    return int(float(found[1]) * UNITS[found[2] or ""])


if __name__ == "__main__":
    main()
