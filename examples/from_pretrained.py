"""A transformers model and its config in one `.tssd` file, loaded without a copy of the weights.

    python examples/from_pretrained.py
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch
import transformers
import tssd
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

PROMPT = torch.arange(16).reshape(1, 16)


def pack(directory: Path, archive: Path) -> None:
    """Packs the directory of a model: its weights, in any number of shards, and all other files."""
    # The command is installed next to Python, which need not be on PATH.
    folders = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    command = os.environ.get("TSSD_BIN") or shutil.which("tssd", path=folders) or "tssd"
    subprocess.run([command, "--quiet", "pack", directory, "-o", archive], check=True)


def from_pretrained(archive: Path) -> PreTrainedModel:
    """Returns the model of a packed directory. Its parameters are views of the archive.

    transformers builds the model on the meta device, assigns the tensors without a copy, ties parameters that share a
    tensor (the archive contains it once, as the safetensors did), and computes the buffers that are not stored. The
    views are copy-on-write: training the model does not change the file.
    """
    # This verifies every byte before it returns. With `verify="off"`, it would read only the index.
    weights = tssd.load_file(archive, backend="mmap")
    with tssd.safe_open(archive, "pt") as file:
        fields = json.loads(file.files()["config.json"])
    model_class = getattr(transformers, fields["architectures"][0])
    config = model_class.config_class.from_dict(fields)
    model = model_class.from_pretrained(None, config=config, state_dict=weights, dtype=config.dtype)
    assert isinstance(model, PreTrainedModel)
    return model


def private_bytes() -> int:
    """Returns the private memory of this process in bytes: neither mapped files nor shared memory."""
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


def main() -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).train(False)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        directory, archive = Path(folder) / "model", Path(folder) / "model.tssd"
        model.save_pretrained(directory, max_shard_size="30MB")
        pack(directory, archive)
        # `tssd unpack` would restore it, file by file.
        shutil.rmtree(directory)
        expected = model(PROMPT).logits

        before = private_bytes()
        loaded = from_pretrained(archive)
        logits = loaded(PROMPT).logits
        grown = private_bytes() - before
        size = archive.stat().st_size
        assert torch.equal(logits, expected)
        assert grown < size / 4, f"{grown} bytes of its own for a model of {size}"

        # A write copies the page to private memory of this process. The file does not change.
        loaded.get_parameter("model.embed_tokens.weight").zero_()
        assert torch.equal(from_pretrained(archive)(PROMPT).logits, expected)
        print(f"logits equal; {size / 1e6:.0f} MB of weights, {grown / 1e6:.0f} MB of memory for them")


if __name__ == "__main__":
    main()
