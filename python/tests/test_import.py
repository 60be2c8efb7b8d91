"""The package without torch, without numpy, and without either."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
import tssd, tempfile, os
path = os.path.join(tempfile.mkdtemp(), "x.tssd")
"""


def run(blocked: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    code = BLOCK.format(blocked=blocked) + code
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_importing_it_imports_neither_torch_nor_numpy() -> None:
    done = run((), "print({'torch', 'numpy', 'ml_dtypes', 'cloudpickle'} & sys.modules.keys())")
    assert done.stdout.strip() == "set()", done.stderr


def test_without_both_it_keeps_what_is_no_tensor() -> None:
    done = run(
        ("torch", "numpy"),
        """
tssd.save_file({"a": [1, None], 2: {}}, path)
assert tssd.load_file(path) == {"a": [1, None], 2: {}}
assert tssd.load(tssd.save({})) == {}
print(tssd.TorchStoreStateDict.from_state_dict({"a": 1}).to_state_dict())
""",
    )
    assert done.stdout.strip() == "{'a': 1}", done.stderr


@pytest.mark.parametrize("framework", ["'torch'", "'numpy'", "None"])
def test_a_tensor_without_both_is_an_error_that_names_what_is_missing(framework: str) -> None:
    pytest.importorskip("numpy")
    make = "import numpy; tssd.save_file({'a': numpy.ones(3)}, sys.argv[1])"
    code = (
        f"import subprocess; subprocess.run([sys.executable, '-c', {'import sys, tssd; ' + make!r}, path], check=True)\n"
        f"tssd.load_file(path, framework={framework})"
    )
    done = run(("torch", "numpy"), code)
    wanted = "torch" if "torch" in framework else "numpy"
    assert "ModuleNotFoundError" in done.stderr and f"'{wanted}'" in done.stderr, done.stderr


def test_without_torch_leaves_of_torch_are_named() -> None:
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
    done = run(("torch",), code)
    assert done.stdout.strip() == "FeatureMissing a.dtype", done.stderr


def test_bf16_without_ml_dtypes_is_an_error_that_names_it() -> None:
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
    done = run(("torch", "ml_dtypes"), code)
    assert done.stdout.strip() == "a True", done.stderr


def test_without_torch_what_torch_has_written_is_not_read() -> None:
    """The command says so by the last line."""
    done = run(("torch",), "import tssd.convert")
    last = done.stderr.splitlines()[-1]
    assert last == "ModuleNotFoundError: No module named 'torch'", done.stderr
