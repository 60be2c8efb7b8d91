"""Compares the installed Python package with the libraries that a user would use without it.

Each case prints a table. A figure is the median of the rounds; a ratio is the speed of tssd as a multiple of that of
the runner. All runners take turns in each round, so that other load on the machine slows all of them alike.
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
from files import FileCases
from model import copy_structure, model_from_spec
from pair import ClientPair
from peer import TORCHSTORE, TorchstoreProcess, torchstore
from race import Rounds
from store import StoreCases

CASES = {
    "put": "a state dict put in a store",
    "cast": "a float32 state dict stored as bfloat16",
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
DEFAULT_MODEL = "shape:qwen3-0.6b"
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
#: Bytes of the model that is written to files, unless another model or size is given.
FILE_BYTES = 600_000_000
#: Bytes of the model for `nested`. The weights are a fifth of a state dict with optimizer state.
NESTED_BYTES = 100_000_000
#: Bytes of the model for `zstd`. Compressing them takes a second.
ZSTD_BYTES = 60_000_000


def main() -> None:
    options = parse_arguments()
    warnings.simplefilter("ignore")
    rounds = Rounds(options.iterations, options.warmup)
    selected = [case for case in CASES if is_selected(options.cases, case)]
    if not selected:
        print(f"python: no case has {' or '.join(options.cases)} in its name, only {', '.join(CASES)}")
        return
    versions = {
        "tssd": tssd.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
        "torchstore": torchstore_version(),
    }
    recorded_options = {name: getattr(options, name) for name in ("model", "iterations", "warmup", "size")}
    records.write("suite", {"name": "python", "versions": versions, "options": recorded_options})
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"{torch.get_num_threads()} threads\n")
    start = time.monotonic()
    if "reshard" in selected:
        # It starts many processes. So it runs first, before this process and its peers allocate memory.
        reshard.reshard(rounds, options.size)
    with torchstore() as peer:
        run_store_cases(options, selected, rounds, peer)
    # The peer has exited: page cache needs memory too, and with less of it, writes wait for the disk earlier.
    run_file_cases(options, selected, rounds)
    with torchstore() as peer:
        run_mixed_cases(options, selected, rounds, peer)
    print(f"{time.monotonic() - start:.0f} seconds")


def run_store_cases(
    options: argparse.Namespace, selected: list[str], rounds: Rounds, peer: TorchstoreProcess | None
) -> None:
    cases = {"put": StoreCases.put, "cast": StoreCases.cast, "get": StoreCases.get, "views": StoreCases.get_views}
    first_cases = {"put": StoreCases.first_put, "get": StoreCases.first_get}
    model_specs = [options.model]
    if options.model == DEFAULT_MODEL:
        model_specs.append(f"uniform:400:{min(536_870_912, options.size or 536_870_912)}")
    for spec in model_specs if set(cases) & set(selected) else []:
        model = model_from_spec(spec, options.size)
        with ExitStack() as stack:
            pair = stack.enter_context(ClientPair(model, copy_structure(model.state)))
            # RPC is slow: it is measured with the last model only.
            rpc_peer = stack.enter_context(torchstore("MonarchRPC")) if spec == model_specs[-1] else None
            stores = StoreCases(pair, rounds, (peer, rpc_peer), options.size)
            for case in selected:
                if case in cases:
                    cases[case](stores)
                if case in first_cases:
                    first_cases[case](stores)
    if "single" in selected:
        store.single(rounds, peer)


def run_file_cases(options: argparse.Namespace, selected: list[str], rounds: Rounds) -> None:
    cases = {
        "save": FileCases.save,
        "load": FileCases.load,
        "one": FileCases.load_tensor,
        "slice": FileCases.load_slice,
        "verify": FileCases.verify,
    }
    if set(cases) & set(selected):
        with temporary_directory() as directory:
            default_size = FILE_BYTES if options.model == DEFAULT_MODEL else None
            files = FileCases(directory, model_from_spec(options.model, options.size or default_size), rounds)
            for case in selected:
                if case in cases:
                    cases[case](files)
    if "zstd" in selected:
        with temporary_directory() as directory:
            model = model_from_spec(options.model, min(ZSTD_BYTES, options.size or ZSTD_BYTES))
            FileCases(directory, model, rounds).compress()


def run_mixed_cases(
    options: argparse.Namespace, selected: list[str], rounds: Rounds, peer: TorchstoreProcess | None
) -> None:
    with temporary_directory() as directory:
        if "nested" in selected:
            size = min(NESTED_BYTES, options.size or NESTED_BYTES)
            model = model_from_spec(f"adamw:{options.model}", size)
            nested.files(directory, model, rounds)
            nested.store(model, rounds, peer, size)
        if "tiny" in selected:
            tiny.files(directory, rounds)
            tiny.store(rounds, peer)
        if "fits" in selected:
            # Four points determine each fit, so fewer rounds are enough.
            with torchstore("MonarchRPC") as rpc_peer:
                fits.fits(directory, rounds.at_most(3), peer, rpc_peer, options.size)


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """Yields a new temporary directory, in TMPDIR."""
    path = Path(tempfile.mkdtemp())
    try:
        yield path
    finally:
        shutil.rmtree(path)


def torchstore_version() -> str:
    """Returns the version of the torchstore package, and its commit if it was installed from a clone."""
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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="cases:\n"
        + "\n".join(f"  {name:<10} {description}" for name, description in CASES.items())
        + f"""

environment:
  TSSD_BIN                the command that serves a store (else the one that PATH has)
  {TORCHSTORE}   a Python that can import torchstore, which takes part then
  {records.FILE}      a file to whose end the results are written, as JSON lines
  TMPDIR                  where files are written: the disk that is measured""",
    )
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
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


def is_selected(filters: list[str], case: str) -> bool:
    """Returns whether a case is selected, by the rule of the benchmark suites in Rust."""
    return not filters or any(filter_word in case for filter_word in filters)


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def size(text: str) -> int:
    """Parses a number of bytes. A kilobyte is 1,000 bytes."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMG]B)?", text.upper())
    if match is None:
        raise ValueError(text)
    return int(float(match[1]) * UNITS[match[2] or ""])


if __name__ == "__main__":
    main()
