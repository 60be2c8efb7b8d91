"""Checks that `tssd` packs, verifies, unpacks and demonstrates files of the safetensors library.

Usage: python safetensors_demo.py TSSD

TSSD is the path of the command. An unpacked file must equal the packed file byte for byte, and
`tssd demo --model` must restore every byte after it has sharded and resharded the file. Two of the
files are also packed as a directory with an index, like a Hugging Face model.

Exits with 0 if all checks hold, with 1 if one fails, and with 2 if the arguments are wrong.
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

# All dtypes of torch that the library writes.
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
    """Packs and unpacks a file. Returns a description of the problem, or None."""
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
    """Packs and unpacks a directory of two files with distinct tensor names. Returns the problem, or None."""
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
    """Runs commands until one fails. Returns a description of the failure, or None."""
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
    common_len = min(len(packed), len(unpacked))
    offset = next((i for i in range(common_len) if packed[i] != unpacked[i]), common_len)
    window = slice(max(0, offset - 32), offset + 32)
    return (
        f"differs from byte {offset} on, {len(packed)} bytes became {len(unpacked)}:\n"
        f"  packed   {packed[window]!r}\n  unpacked {unpacked[window]!r}"
    )


# ---- The files -----------------------------------------------------------------------------------


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor of random bits, which include NaNs of every kind."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def write_dtypes(path: Path) -> None:
    """Writes every dtype in every shape, except a scalar of the dtype that packs two elements into a byte."""
    tensors = {
        f"{dtype}.{name}": random_tensor(getattr(torch, dtype), shape)
        for dtype in DTYPES
        for name, shape in SHAPES.items()
        if (dtype, name) != ("float4_e2m1fn_x2", "scalar")
    }
    save_file(tensors, path)


def write_names(path: Path) -> None:
    """Writes names and metadata that JSON must escape, and a name that is a prefix of other names."""
    names = ["a", "a.b", "a.b.0", "", ".", "..", "0", "ünïcödé 模型 🦀", 'quote " slash \\ tab \t']
    tensors = {name: random_tensor(torch.float32, (len(name), 3)) for name in names}
    save_file(tensors, path, metadata={"format": 'pt "\\ é\n'})


def write_empty(path: Path) -> None:
    save_file({}, path)


def write_large(path: Path) -> None:
    """Writes a tensor of several checksummed chunks, the last of which is partial."""
    save_file({"weight": random_tensor(torch.bfloat16, (2049, 1027)), "bias": torch.ones(3)}, path)


def write_tied_model(path: Path) -> None:
    """Writes a model with a tied head and embedding. The library drops one and records it in the metadata."""
    model = Model(vocabulary=151, hidden=48, layers=2)
    assert model.lm_head.weight is model.embed_tokens.weight
    save_model(model, str(path))


class Model(nn.Module):
    """A small language model with sizes that four ranks do not divide evenly."""

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
    "nothing": write_empty,
    "large": write_large,
    "tied_model": write_tied_model,
}
# `tssd demo` needs a model with tensors.
NO_MODELS = {"nothing"}


if __name__ == "__main__":
    sys.exit(main())
