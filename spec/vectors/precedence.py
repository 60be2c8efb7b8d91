"""Checks that each invalid vector breaks one rule, apart from rules that presuppose it.

Section 2 of format.md has a table of the rules that each rule presupposes. reader.py collects all violations of
a vector. Of the broken rules, one is *independent* if it presupposes no other broken one. This must be the rule
that the vector is listed with.
"""

import os
import re
import sys
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import reader  # noqa: E402

DOCUMENT = Path(reader.__file__).with_name("format.md")
BEGIN, END = "<!-- presupposes: begin -->", "<!-- presupposes: end -->"
NO_RULE = "–"


def read_table(document):
    """Returns the rules that each rule presupposes, directly or by another rule."""
    table = document.partition(BEGIN)[2].partition(END)[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| F-")]
    direct = {rule: set() for rule in reader.KINDS}
    in_table = set()
    for left, right in rows:
        for rule in rules_of(left):
            direct[rule].update(rules_of(right))
            in_table.add(rule)
    missing = reader.KINDS.keys() - in_table
    assert not missing, f"the table of section 2 lacks {sorted(missing)}"
    return {rule: with_presupposed(rule, direct) for rule in direct}


def rules_of(cell):
    """Returns the rules of a cell of the table, such as `F-030, F-032 to F-061`."""
    if cell == NO_RULE:
        return []
    parts = [part.split(" to ") for part in cell.split(", ")]
    for rule in chain(*parts):
        assert re.fullmatch(r"F-\d{3}", rule), f"{rule!r} in the table of section 2 is no rule"
    unknown = {part[0] for part in parts if len(part) == 1} - reader.KINDS.keys()
    assert not unknown, f"the table of section 2 has unknown rules {sorted(unknown)}"
    return [rule for rule in reader.KINDS if any(part[0] <= rule <= part[-1] for part in parts)]


def with_presupposed(rule, direct):
    found, waiting = set(), list(direct[rule])
    while waiting:
        each = waiting.pop()
        assert each != rule, f"{rule} presupposes itself"
        if each not in found:
            found.add(each)
            waiting += direct[each]
    return found


def check_precedence(listed, files):
    """Exits with an error if a vector breaks another rule than its own that does not presuppose it."""
    presupposed = read_table(DOCUMENT.read_text(encoding="utf-8"))
    failures = []
    for vector in listed:
        violations = {each.rule: each for each in find_violations(files[vector["name"]])}
        independent = {rule for rule in violations if not presupposed[rule] & violations.keys()}
        if independent != {vector["rule"]}:
            breaks = "; ".join(str(violations[rule]) for rule in sorted(independent)) or "no rule"
            failures.append(f"{vector['name']} is listed with {vector['rule']}, and breaks: {breaks}")
    if failures:
        sys.exit("\n".join(failures))


def find_violations(content):
    """Returns the violations of a vector: of an archive, or of the files of a directory by their names."""
    if isinstance(content, bytes):
        return reader.find_violations(lambda: reader.open_archive(content))
    with TemporaryDirectory() as folder:
        for name, part in content.items():
            path = Path(folder, name)
            # The content of a link is the name of its target.
            os.symlink(part, path) if isinstance(part, str) else path.write_bytes(part)
        return reader.find_violations(lambda: reader.open_path(Path(folder)))
