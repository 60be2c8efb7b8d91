"""Runs the GPU tests and benchmarks of TSSD on this machine, and prints one report.

Needs Linux, an NVIDIA GPU with its driver, Python 3.11 or later, numpy, and torch 2.11 or later. Needs no Rust, no
network and no installation: copy the folder to the machine, and run `python3 run.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MIN_TORCH = (2, 11)
# Maximum duration of a Rust test in seconds. They take a few seconds each.
TIMEOUT = 300
# What the Rust tests print if a machine lacks what a test needs.
SKIPPED = "left out"

VERSIONS = """
import json, platform
found = {"python": platform.python_version()}
for name in ["torch", "numpy", "tssd"]:
    try:
        found[name] = __import__(name).__version__
    except ImportError as error:
        found[name] = f"missing: {error}"
try:
    import torch
    found["CUDA of torch"] = str(torch.version.cuda)
    found["GPUs of torch"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
except ImportError:
    pass
print(json.dumps(found))
"""

Result = tuple[str, str, str]
"""Name of a test, its outcome (passed, failed or skipped), and the output or the reason."""


def unpack_wheel(folder: Path) -> tuple[Path, Path]:
    """Unpacks the wheel. Returns the folder of the package and the path of the command."""
    with zipfile.ZipFile(next(HERE.glob("tssd-*.whl"))) as wheel:
        wheel.extractall(folder)
    command = next(folder.glob("tssd-*.data/scripts/tssd*"))
    command.chmod(0o755)
    return folder, command


def describe(environment: dict[str, str]) -> dict[str, Any]:
    """Returns the versions and the devices of this machine."""
    output = subprocess.run([sys.executable, "-c", VERSIONS], env=environment, capture_output=True, text=True)
    machine: dict[str, Any] = {"kernel": platform.release(), "libc": " ".join(platform.libc_ver())}
    machine |= json.loads(output.stdout) if output.returncode == 0 else {"python": output.stderr.strip()}
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        machine["nvidia-smi"] = subprocess.run(query, capture_output=True, text=True).stdout.strip().splitlines()
    except OSError as error:
        machine["nvidia-smi"] = f"missing: {error}"
    return machine


def rust_test_names() -> list[str]:
    # All tests in modules need a GPU, and are ignored without `--ignored`. The output has the reason of each.
    output = subprocess.run([HERE / "gpu-tests", "::"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^test (\S+) \.\.\. ignored, needs (?:a GPU|several GPUs)$", output, re.MULTILINE)


def run_rust_test(name: str, environment: dict[str, str]) -> Result:
    """Runs one test in its own process, since some tests count calls and bytes."""
    command = [HERE / "gpu-tests", "--exact", name, "--ignored", "--nocapture"]
    try:
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return name, "failed", f"it ran for more than {TIMEOUT} seconds"
    output = result.stdout + result.stderr
    if result.returncode != 0 or "1 passed" not in output:
        return name, "failed", output
    skipped = [line for line in output.splitlines() if SKIPPED in line]
    return (name, "skipped", skipped[0]) if skipped else (name, "passed", "")


def run_python_tests(folder: Path, environment: dict[str, str]) -> list[Result]:
    report = folder / "python.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", HERE / "python"]
    command += ["-c", "/dev/null", f"--junitxml={report}", HERE / "python/gpu_cases.py"]
    output = subprocess.run(command, env=environment, capture_output=True, text=True)
    if not report.exists():
        return [("gpu_cases.py", "failed", output.stdout + output.stderr)]
    results = []
    for case in xml.parse(report).getroot().iter("testcase"):
        problems = [child for child in case if child.tag in ("failure", "error", "skipped")]
        outcome = "passed" if not problems else "skipped" if problems[0].tag == "skipped" else "failed"
        messages = [problem.get("message") or "" for problem in problems]
        # The text of a failure has its traceback.
        texts = [problem.text or "" for problem in problems if outcome == "failed"]
        text = "\n".join(messages + texts)
        results.append((f"gpu_cases.py::{case.get('name')}", outcome, text))
    return results or [("gpu_cases.py", "failed", "no tests were collected")]


def run_bench(folder: Path, options: list[str], environment: dict[str, str]) -> tuple[list[dict[str, Any]], str]:
    """Runs the benchmark. Returns its records, and its output if it has failed."""
    records = folder / "records.jsonl"
    command = [HERE / "gpu-bench", *options]
    environment = environment | {"TSSD_BENCH_RECORDS": str(records)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = records.read_text().splitlines() if records.exists() else []
    return [json.loads(line) for line in lines], "" if result.returncode == 0 else result.stdout + result.stderr


def print_results(title: str, results: list[Result]) -> None:
    print(f"\n{title}\n")
    for name, outcome, text in results:
        print(f"  {outcome:8} {name}")
        if text:
            # The end has the error.
            print("\n".join(f"           {line}" for line in text.strip().splitlines()[-20:]))


def print_races(records: list[dict[str, Any]]) -> None:
    """Prints the median speed of each runner, and its speed relative to plain copies in the same run."""
    print("\nBandwidth: median of all rounds. Runners of a race take turns, in one run.")
    for suite in (record["suite"] for record in records if "suite" in record):
        for name, uuid in suite["versions"].items():
            print(f"\n  Device: {name}, {uuid}")
    for race in (record["race"] for record in records if "race" in record):
        limits = [runner for runner in race["runners"] if runner["role"] == "limit"]
        limit = statistics.median(limits[0]["seconds"]) if limits else None
        print(f"\n  {race['what']}: {race['tensors']} tensors of {race['state_dict']}")
        for runner in race["runners"]:
            seconds = statistics.median(runner["seconds"])
            speed = f"{race['bytes'] / seconds / 1e9:8.2f} GB/s" if race["bytes"] else ""
            relative = f"{limit / seconds:6.2f} of {limits[0]['name']}" if limit else ""
            print(f"    {runner['name']:32} {seconds * 1e3:10.2f} ms {speed} {relative}")
    for count in (record["count"] for record in records if "count" in record):
        print(f"\n  {count['operation']}")
        for what, number in count["counts"].items():
            print(f"    {what:48} {number}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="shape:qwen3-8b", help="state dict of the benchmarks, or its shape")
    parser.add_argument("--size", default="8GB", help="its maximum size: layers beyond it are dropped (default: 8GB)")
    parser.add_argument("--iterations", help="measured rounds of each benchmark (default: 9)")
    parser.add_argument("--no-bench", action="store_true", help="run the tests only")
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        package, command = unpack_wheel(folder / "wheel")
        paths = [str(package), str(HERE / "site-packages"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TSSD_BIN": str(command)}
        machine = describe(environment)
        print("Machine\n")
        for name, value in machine.items():
            print(f"  {name:16} {'; '.join(value) if isinstance(value, list) else value}")
        version = re.match(r"(\d+)\.(\d+)", str(machine.get("torch")))
        if version is None or tuple(map(int, version.groups())) < MIN_TORCH:
            print(f"\n  note: the tests of torch tensors need torch {'.'.join(map(str, MIN_TORCH))} or later")
        rust = [run_rust_test(name, environment) for name in rust_test_names()]
        print_results("Rust tests", rust)
        python = run_python_tests(folder, environment)
        print_results("Python tests", python)
        records: list[dict[str, Any]] = []
        benches: list[Result] = []
        if not arguments.no_bench:
            options = ["--model", arguments.model, "--size", arguments.size]
            options += ["--iterations", arguments.iterations] if arguments.iterations else []
            records, error = run_bench(folder, options, environment)
            print_races(records)
            benches = [("gpu-bench", "failed" if error else "passed", error)]
            print_results("Benchmark", benches)
    results = rust + python + benches
    if arguments.json:
        report = {"machine": machine, "tests": results, "records": records}
        arguments.json.write_text(json.dumps(report, indent=1))
    count = {outcome: sum(result[1] == outcome for result in results) for outcome in ("passed", "failed", "skipped")}
    seconds = time.monotonic() - started
    print(f"\n{count['skipped']} skipped, {seconds:.0f} s")
    # The last line has the format of all checks of the project.
    print(f"{count['passed']} passed, {count['failed']} failed")
    # Without a GPU, all tests are skipped or have failed.
    sys.exit(0 if rust and count["passed"] > 0 and count["failed"] == 0 else 1)


main()
