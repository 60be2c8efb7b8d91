"""Use of the package without torch, without numpy, and without both."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKER_SCRIPT = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
import tssd, tempfile, os
path = os.path.join(tempfile.mkdtemp(), "x.tssd")
"""


def run_without(blocked: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    code = BLOCKER_SCRIPT.format(blocked=blocked) + code
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_import_loads_neither_torch_nor_numpy() -> None:
    result = run_without((), "print({'torch', 'numpy', 'ml_dtypes', 'cloudpickle'} & sys.modules.keys())")
    assert result.stdout.strip() == "set()", result.stderr


def test_plain_values_roundtrip_without_torch_and_numpy() -> None:
    result = run_without(
        ("torch", "numpy"),
        """
tssd.save_file({"a": [1, None], 2: {}}, path)
assert tssd.load_file(path) == {"a": [1, None], 2: {}}
assert tssd.load(tssd.save({})) == {}
print(tssd.TorchStoreStateDict.from_state_dict({"a": 1}).to_state_dict())
""",
    )
    assert result.stdout.strip() == "{'a': 1}", result.stderr


@pytest.mark.parametrize("framework", ["'torch'", "'numpy'", "None"])
def test_error_names_missing_framework(framework: str) -> None:
    pytest.importorskip("numpy")
    save = "import numpy; tssd.save_file({'a': numpy.ones(3)}, sys.argv[1])"
    code = (
        f"import subprocess; subprocess.run([sys.executable, '-c', {'import sys, tssd; ' + save!r}, path], check=True)\n"
        f"tssd.load_file(path, framework={framework})"
    )
    result = run_without(("torch", "numpy"), code)
    expected = "torch" if "torch" in framework else "numpy"
    assert "ModuleNotFoundError" in result.stderr and f"'{expected}'" in result.stderr, result.stderr


def test_error_names_torch_leaf_without_torch() -> None:
    pytest.importorskip("torch")
    code = """
import subprocess
make = "import sys, torch, tssd; tssd.save_file({'a': {'dtype': torch.float16}}, sys.argv[1])"
subprocess.run([sys.executable, '-c', make, path], check=True)
try:
    tssd.load_file(path)
except TypeError as error:
    print(error.kind, error.fqn)
"""
    result = run_without(("torch",), code)
    assert result.stdout.strip() == "FeatureMissing a.dtype", result.stderr


def test_error_names_missing_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert ml_dtypes
    code = """
import subprocess
make = "import sys, numpy, ml_dtypes, tssd; tssd.save_file({'a': numpy.ones(2, ml_dtypes.bfloat16)}, sys.argv[1])"
subprocess.run([sys.executable, '-c', make, path], check=True)
try:
    tssd.load_file(path, framework="numpy")
except TypeError as error:
    print(error.fqn, "ml_dtypes" in str(error))
"""
    result = run_without(("torch", "ml_dtypes"), code)
    assert result.stdout.strip() == "a True", result.stderr


def test_convert_without_torch_names_torch() -> None:
    """`tssd convert` takes its message from the last line of stderr."""
    result = run_without(("torch",), "import tssd.convert")
    last = result.stderr.splitlines()[-1]
    assert last == "ModuleNotFoundError: No module named 'torch'", result.stderr
