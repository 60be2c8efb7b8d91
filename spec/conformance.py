#!/usr/bin/env python3
"""Tests any reader of TSSD archives against the vectors in vectors/.

    conformance.py [OPTIONS] -- COMMAND {file}

For each vector COMMAND is run, without a shell, with `{file}` replaced by the path of the vector. The
path is that of a file or, if the vector is a shard set, of a directory with `manifest.tssd` and the
archives that it names. What a reader must do:

- With a valid vector, it exits with status 0 and prints the JSON view (format.md, section 9) to
  stdout, as UTF-8. The view is compared as JSON with that in the `json` of the vector: 1 is neither
  true nor 1.0; the order of the members of an object and white space do not count.
- With an invalid one, it exits with another status, and the first word of the last line of stderr is
  the error kind, such as `HeapRange`. Lines of white space do not count, nor does a `:` at the end of the
  word. It proves all that can be proven: some vectors break rules of the payload, and those whose
  `at` in the manifest is `deep` are refused by deep verification only.
- It does so within 60 seconds, and is not ended by a signal.

    --verdict-only    invalid vectors: that they are refused, for whatever reason
    --only F-065      only vectors that break this rule (may be repeated)
    --sample          one vector of each rule, and every fourth valid one
    --table           also prints how many vectors of each rule passed
    --timeout N       seconds for one run, 60 unless told otherwise
    --jobs N          runs at once, as many as there are processors unless told otherwise

The exit status is 0 if all is as expected, 1 if not, 2 if COMMAND cannot be run at all. An example:

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
VALID = "valid"  # stands for the rule of a vector that breaks none
PLACEHOLDER = "{file}"


class Vector(NamedTuple):
    name: str
    path: Path
    rule: str
    kind: str | None  # none if the vector is valid
    view: Path | None  # the JSON view, if it is


class Answer(NamedTuple):
    status: int | None  # none if it took too long
    stdout: bytes
    stderr: bytes


def read_vectors(folder: Path) -> list[Vector]:
    # The archives in generated/ are not under version control.
    subprocess.run([sys.executable, folder / "make_invalid.py", "--generated"], check=True)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    vectors = []
    for part in ("valid", "invalid"):
        for listed in manifest[part]:
            path = folder / listed["file"]  # of a shard set, a directory
            check_digest(path, listed["sha256"])
            rule, kind = listed.get("rule", VALID), listed.get("kind")
            view = folder / listed["json"] if "json" in listed else None
            vectors.append(Vector(f"{part}/{listed['name']}", path, rule, kind, view))
    return vectors


def check_digest(path: Path, expected: str | dict[str, str]) -> None:
    """Vectors that have changed prove nothing."""
    if isinstance(expected, dict):
        for name, digest in expected.items():
            check_digest(path / name, digest)
    elif hashlib.sha256(path.read_bytes()).hexdigest() != expected:
        sys.exit(f"{path} is not the vector that manifest.json names")


def sample(vectors: list[Vector]) -> list[Vector]:
    """One vector of each rule, and every fourth of those that break none."""
    first_of_rule = {vector.rule: vector for vector in reversed(vectors) if vector.kind}
    valid = [vector for vector in vectors if not vector.kind]
    return valid[::4] + sorted(first_of_rule.values(), key=lambda vector: vector.rule)


def run(command: list[str], path: Path, timeout: float) -> Answer:
    words = [word.replace(PLACEHOLDER, str(path)) for word in command]
    try:
        ended = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return Answer(None, b"", b"")
    return Answer(ended.returncode, ended.stdout, ended.stderr)


def failure_of(vector: Vector, answer: Answer, verdict_only: bool) -> str | None:
    """What is wrong with an answer, in a few words."""
    if answer.status is None:
        return "no answer in time"
    if answer.status < 0:
        return f"ended by signal {-answer.status}"
    if vector.view is not None:
        return failure_of_view(vector.view, answer)
    if answer.status == 0:
        return f"expected {vector.kind}, found status 0"
    found = kind_of(answer.stderr)
    if verdict_only or found == vector.kind:
        return None
    return f"expected {vector.kind}, found {shortened(found)}"


def failure_of_view(view: Path, answer: Answer) -> str | None:
    if answer.status != 0:
        found = shortened(last_line(answer.stderr))
        return f"expected status 0, found {answer.status}: {found}"
    try:
        found = json.loads(answer.stdout)
    except (ValueError, RecursionError) as error:
        return f"expected JSON on stdout, found {shortened(str(error))}"
    wanted = json.loads(view.read_text(encoding="utf-8"))
    return difference(wanted, found, "view")


def last_line(stderr: bytes) -> str:
    # Lines end with a line feed; `splitlines` would find more ends in what a message cites.
    lines = [line for line in stderr.decode("utf-8", "replace").split("\n") if line.strip()]
    return lines[-1] if lines else ""


def kind_of(stderr: bytes) -> str:
    words = last_line(stderr).split()
    return words[0].rstrip(":") if words else "nothing on stderr"


def shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:79]}…"


def difference(wanted: Any, found: Any, where: str) -> str | None:
    """The first place where two JSON values differ. To Python, 1 == True == 1.0; not so to JSON."""
    if type(wanted) is not type(found):
        return f"{where}: expected {spelled(wanted)}, found {spelled(found)}"
    if isinstance(wanted, dict):
        if wanted.keys() != found.keys():
            return f"{where}: expected members {sorted(wanted)}, found {sorted(found)}"
        parts = ((wanted[name], found[name], f"{where}.{name}") for name in wanted)
    elif isinstance(wanted, list):
        if len(wanted) != len(found):
            return f"{where}: expected {len(wanted)} entries, found {len(found)}"
        pairs = enumerate(zip(wanted, found))
        parts = ((one, other, f"{where}[{i}]") for i, (one, other) in pairs)
    else:
        return (
            None
            if wanted == found
            else f"{where}: expected {spelled(wanted)}, found {spelled(found)}"
        )
    return next((each for each in (difference(*part) for part in parts) if each), None)


def spelled(value: Any) -> str:
    return shortened(json.dumps(value, ensure_ascii=False))


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
        answer = run(command, vector.path, options.timeout)
        return failure_of(vector, answer, options.verdict_only)

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
