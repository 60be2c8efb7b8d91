#!/usr/bin/env python3
"""Tests a reader of TSSD archives, in any language, against the vectors in vectors/.

    conformance.py [OPTIONS] -- COMMAND {file}

It runs COMMAND for each vector, without a shell, and replaces `{file}` by the path of the vector. The
path is that of a file, or of a directory: of a shard set, with `manifest.tssd` and the archives that it
names, or of a delta, with `delta.tssd` and its base `base.tssd`. Requirements for the reader:

- For a valid vector, it exits with status 0 and prints the JSON view (format.md, section 9) to
  stdout, as UTF-8. The view must equal the `json` of the vector, compared as JSON: 1 is neither
  true nor 1.0; the order of the members of an object and white space do not count.
- For an invalid vector, it exits with another status, and the first word of the last line of stderr is
  the error kind, such as `HeapRange`. Lines of white space do not count, nor does a `:` at the end of the
  word. The reader must run every verification: some vectors violate rules of the payload. Only deep
  verification rejects those whose `at` in the manifest is `deep`, and only a comparison with the base those
  with `base`.
- It exits within 60 seconds, and no signal ends it.

    --verdict-only    checks only that invalid vectors are rejected, not the error kind
    --only F-065      runs only vectors that violate this rule (can be repeated)
    --sample          runs one vector of each rule, and every fourth valid one
    --table           also prints how many vectors of each rule passed
    --timeout N       seconds for one run (default: 60)
    --jobs N          runs at the same time (default: the number of processors)

The exit status is 0 if all vectors pass, 1 if one fails, 2 if COMMAND cannot be run. An example:

    conformance.py -- python3 reader.py {file}
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

VECTORS = Path(__file__).parent / "vectors"
VALID = "valid"  # the rule name of valid vectors
PLACEHOLDER = "{file}"


class Vector(NamedTuple):
    name: str
    path: Path  # a directory if the vector is a shard set, or a delta and its base
    rule: str
    kind: str | None  # the expected error kind; None if the vector is valid
    view: Path | None  # the file with the JSON view; None if the vector is invalid


class CommandResult(NamedTuple):
    status: int | None  # None after a timeout
    stdout: bytes
    stderr: bytes


def read_vectors(folder: Path) -> list[Vector]:
    # The archives in generated/ are not under version control.
    subprocess.run([sys.executable, folder / "make_invalid.py", "--generated"], check=True)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    vectors = []
    for part in ("valid", "invalid"):
        for listed in manifest[part]:
            path = folder / listed["file"]
            check_digest(path, listed["sha256"])
            rule, kind = listed.get("rule", VALID), listed.get("kind")
            view = folder / listed["json"] if "json" in listed else None
            vectors.append(Vector(f"{part}/{listed['name']}", path, rule, kind, view))
    return vectors


def check_digest(path: Path, expected: str | dict[str, str]) -> None:
    """Exits with an error if a vector differs from the digest in the manifest."""
    if isinstance(expected, dict):
        for name, digest in expected.items():
            check_digest(path / name, digest)
    elif hashlib.sha256(path.read_bytes()).hexdigest() != expected:
        sys.exit(f"{path} is not the vector that manifest.json names")


def sample(vectors: list[Vector]) -> list[Vector]:
    """Returns one vector of each rule, and every fourth valid vector."""
    first_by_rule = {vector.rule: vector for vector in reversed(vectors) if vector.kind}
    valid = [vector for vector in vectors if not vector.kind]
    return valid[::4] + sorted(first_by_rule.values(), key=lambda vector: vector.rule)


def run(command: list[str], path: Path, timeout: float) -> CommandResult:
    words = [word.replace(PLACEHOLDER, str(path)) for word in command]
    try:
        completed = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return CommandResult(None, b"", b"")
    return CommandResult(completed.returncode, completed.stdout, completed.stderr)


def describe_failure(vector: Vector, result: CommandResult, verdict_only: bool) -> str | None:
    """Describes what is wrong with a result. Returns None if it is correct."""
    if result.status is None:
        return "no answer in time"
    if result.status < 0:
        return f"ended by signal {-result.status}"
    if vector.view is not None:
        return describe_view_failure(vector.view, result)
    if result.status == 0:
        return f"expected {vector.kind}, found status 0"
    found = parse_kind(result.stderr)
    if verdict_only or found == vector.kind:
        return None
    return f"expected {vector.kind}, found {shorten(found)}"


def describe_view_failure(view: Path, result: CommandResult) -> str | None:
    if result.status != 0:
        found = shorten(last_line(result.stderr))
        return f"expected status 0, found {result.status}: {found}"
    try:
        found = json.loads(result.stdout)
    except (ValueError, RecursionError) as error:
        return f"expected JSON on stdout, found {shorten(str(error))}"
    expected = json.loads(view.read_text(encoding="utf-8"))
    return describe_difference(expected, found, "view")


def last_line(stderr: bytes) -> str:
    # Only a line feed ends a line. `splitlines` would also split at other characters, which a message may quote.
    lines = [line for line in stderr.decode("utf-8", "replace").split("\n") if line.strip()]
    return lines[-1] if lines else ""


def parse_kind(stderr: bytes) -> str:
    words = last_line(stderr).split()
    return words[0].rstrip(":") if words else "nothing on stderr"


def shorten(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:79]}…"


def describe_difference(expected: Any, found: Any, where: str) -> str | None:
    """Describes the first difference between two JSON values. Returns None if they are equal.

    1, True and 1.0 are equal in Python, but not in JSON.
    """
    if type(expected) is not type(found):
        return f"{where}: expected {format_value(expected)}, found {format_value(found)}"
    if isinstance(expected, dict):
        if expected.keys() != found.keys():
            return f"{where}: expected members {sorted(expected)}, found {sorted(found)}"
        parts = ((expected[name], found[name], f"{where}.{name}") for name in expected)
    elif isinstance(expected, list):
        if len(expected) != len(found):
            return f"{where}: expected {len(expected)} entries, found {len(found)}"
        pairs = enumerate(zip(expected, found))
        parts = ((one, other, f"{where}[{i}]") for i, (one, other) in pairs)
    else:
        return (
            None
            if expected == found
            else f"{where}: expected {format_value(expected)}, found {format_value(found)}"
        )
    return next((each for each in (describe_difference(*part) for part in parts) if each), None)


def format_value(value: Any) -> str:
    return shorten(json.dumps(value, ensure_ascii=False))


def print_table(vectors: list[Vector], failed: set[str]) -> None:
    total = Counter(vector.rule for vector in vectors)
    passed = Counter(vector.rule for vector in vectors if vector.name not in failed)
    print("rule   passed  of")
    for rule in sorted(total):
        print(f"{rule:6} {passed[rule]:6} {total[rule]:3}")


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    own, command = arguments[:split], arguments[split + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--verdict-only", action="store_true")
    parser.add_argument("--only", action="append", metavar="RULE")
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(own)
    if not any(PLACEHOLDER in word for word in command):
        parser.error(f"a command with {PLACEHOLDER} is needed after --")
    return options, command


def main(arguments: list[str]) -> int:
    options, command = parse(arguments)
    vectors = read_vectors(VECTORS)
    if options.only:
        vectors = [vector for vector in vectors if vector.rule in options.only]
    if options.sample:
        vectors = sample(vectors)

    def check(vector: Vector) -> str | None:
        result = run(command, vector.path, options.timeout)
        return describe_failure(vector, result, options.verdict_only)

    try:
        with ThreadPoolExecutor(options.jobs) as pool:
            failures = dict(zip((vector.name for vector in vectors), pool.map(check, vectors)))
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 2
    failed = {name: failure for name, failure in failures.items() if failure}
    for name, failure in failed.items():
        print(f"{name}: {failure}")
    if options.table:
        print_table(vectors, set(failed))
    print(f"{len(vectors) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed or not vectors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
