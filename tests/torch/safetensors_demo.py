"""Has `tssd` pack, verify, unpack and demonstrate files that the safetensors library wrote.

Usage: python safetensors_demo.py TSSD

TSSD is the built command-line tool. What it unpacks must be the file that it packed, byte for byte,
and `tssd demo --model` must find every byte of it again after it has been sharded and resharded.
Two of the files are packed once more as a directory with an index, as Hugging Face has models.

Exits 0 if all of that holds for all files, 1 if not, 2 if it was called in another way.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import __version__ as safetensors_version
from safetensors.torch import save_file, save_model
from torch import nn

# All that the library writes from torch.
DTYPES = """
bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64
float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2
""".split()
SHAPES = {"matrix": (5, 6), "scalar": (), "empty": (0,), "hollow": (2, 0, 3)}
TIMEOUT_SECONDS = 600


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    tssd = Path(sys.argv[1]).absolute()
    torch.manual_seed(0)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, write in FILES.items():
            path = Path(folder) / f"{name}.safetensors"
            write(path)
            problem = check(tssd, path)
            failed += problem is not None
            print(f"{name} ({path.stat().st_size:,} bytes): {problem or 'ok'}")
        problem = check_directory(tssd, Path(folder))
        failed += problem is not None
        print(f"directory: {problem or 'ok'}")
    print(f"safetensors {safetensors_version}, torch {torch.__version__}")
    print(f"{len(FILES) + 1 - failed} passed, {failed} failed")
    return 1 if failed else 0


def check(tssd: Path, source: Path) -> str | None:
    """What is wrong with what becomes of a file, if anything."""
    packed, unpacked = source.with_suffix(".tssd"), source.with_suffix(".unpacked")
    commands = [
        ["pack", source, "-o", packed],
        ["verify", packed],
        ["unpack", packed, "-o", unpacked],
    ]
    if source.stem not in NO_MODELS:
        commands.append(["demo", "--model", source])
    problem = run_all(tssd, commands)
    if problem is not None:
        return problem
    return first_difference(source.read_bytes(), unpacked.read_bytes())


def check_directory(tssd: Path, folder: Path) -> str | None:
    """The same of a directory that is made of two of the files: their tensors have distinct names."""
    model, packed, unpacked = folder / "model", folder / "model.tssd", folder / "unpacked"
    model.mkdir()
    weight_map = {}
    for name in ("dtypes.safetensors", "large.safetensors"):
        shutil.copyfile(folder / name, model / name)
        content = (model / name).read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        weight_map |= {tensor: name for tensor in header if tensor != "__metadata__"}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (model / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    commands = [
        ["pack", model, "-o", packed],
        ["verify", packed],
        ["unpack", packed, "-o", f"{unpacked}/"],
    ]
    problem = run_all(tssd, commands)
    if problem is not None:
        return problem
    names = sorted(path.name for path in unpacked.iterdir())
    if names != sorted(path.name for path in model.iterdir()):
        return f"became {names}"
    for name in names:
        difference = first_difference((model / name).read_bytes(), (unpacked / name).read_bytes())
        if difference is not None:
            return f"{name} {difference}"
    return None


def run_all(tssd: Path, commands: list[list[str | Path]]) -> str | None:
    """Runs commands until one fails; says how it does."""
    for command in commands:
        try:
            run = subprocess.run(
                [tssd, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"tssd {command[0]} takes more than {TIMEOUT_SECONDS} s"
        if run.returncode != 0:
            return f"tssd {command[0]} exits {run.returncode}:\n{run.stdout.strip()}"
    return None


def first_difference(packed: bytes, unpacked: bytes) -> str | None:
    if packed == unpacked:
        return None
    both = min(len(packed), len(unpacked))
    at = next((i for i in range(both) if packed[i] != unpacked[i]), both)
    around = slice(max(0, at - 32), at + 32)
    return (
        f"differs from byte {at} on, {len(packed)} bytes became {len(unpacked)}:\n"
        f"  packed   {packed[around]!r}\n  unpacked {unpacked[around]!r}"
    )


# ---- The files -----------------------------------------------------------------------------------


def random(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bits at all, NaNs of every kind among them."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def write_dtypes(path: Path) -> None:
    """Every dtype in every shape, but no scalar of the packed one: a byte is two of its elements."""
    tensors = {
        f"{dtype}.{name}": random(getattr(torch, dtype), shape)
        for dtype in DTYPES
        for name, shape in SHAPES.items()
        if (dtype, name) != ("float4_e2m1fn_x2", "scalar")
    }
    save_file(tensors, path)


def write_names(path: Path) -> None:
    """Names and metadata that need care in JSON, and one that is also the beginning of others."""
    names = ["a", "a.b", "a.b.0", "", ".", "..", "0", "ünïcödé 模型 🦀", 'quote " slash \\ tab \t']
    tensors = {name: random(torch.float32, (len(name), 3)) for name in names}
    save_file(tensors, path, metadata={"format": 'pt "\\ é\n'})


def write_nothing(path: Path) -> None:
    save_file({}, path)


def write_large(path: Path) -> None:
    """Several checksummed chunks, and an end in the middle of one."""
    save_file({"weight": random(torch.bfloat16, (2049, 1027)), "bias": torch.ones(3)}, path)


def write_tied_model(path: Path) -> None:
    """A model whose head is its embedding. The library drops one, and says so in the metadata."""
    model = Model(vocabulary=151, hidden=48, layers=2)
    assert model.lm_head.weight is model.embed_tokens.weight
    save_model(model, str(path))


class Model(nn.Module):
    """Of the shape of a language model, with sizes that four ranks cannot share evenly."""

    def __init__(self, vocabulary: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, hidden, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(layers))
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False, dtype=torch.bfloat16)
        self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("inv_freq", torch.rand(hidden // 2))


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(hidden, hidden, bias=False, dtype=torch.bfloat16))
        self.gate = nn.Linear(hidden, 7, bias=False)
        self.norm = nn.LayerNorm(hidden, dtype=torch.bfloat16)


FILES = {
    "dtypes": write_dtypes,
    "names": write_names,
    "nothing": write_nothing,
    "large": write_large,
    "tied_model": write_tied_model,
}
# Of a model without tensors there is nothing to demonstrate.
NO_MODELS = {"nothing"}


if __name__ == "__main__":
    sys.exit(main())
