"""A transformers model and its config in one `.tssd` file: loaded as a private map, no second copy of the weights.

    python examples/from_pretrained.py
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
import transformers
import tssd
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

PROMPT = torch.arange(16).reshape(1, 16)


def pack(directory: Path, archive: Path) -> None:
    """Packs a model's directory: its weights, in however many shards they come, and all other files."""
    command = os.environ.get("TSSD_BIN", "tssd")
    subprocess.run([command, "--quiet", "pack", directory, "-o", archive], check=True)


def from_pretrained(archive: Path) -> PreTrainedModel:
    """The model of such a directory, its parameters views of the archive.

    transformers builds it on the meta device, gives it the tensors as they are, ties those that share one
    (the file has them once, as the safetensors had), and computes the buffers that no file has. The views
    are copy-on-write: the model may be trained, the file does not change.
    """
    # Every byte is proven before this returns; "off" or "lazy" reads none of them now.
    weights = tssd.load_file(archive, backend="mmap")
    files: dict[str, bytes] = weights.pop(".files")
    fields = json.loads(files["config.json"])
    model_class = getattr(transformers, fields["architectures"][0])
    config = model_class.config_class.from_dict(fields)
    model = model_class.from_pretrained(None, config=config, state_dict=weights, dtype=config.dtype)
    assert isinstance(model, PreTrainedModel)
    return model


def private_bytes() -> int:
    """The memory that is this process's own: neither files nor shared."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


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
        # `tssd unpack` would give it back, file by file.
        shutil.rmtree(directory)
        wanted = model(PROMPT).logits

        before = private_bytes()
        loaded = from_pretrained(archive)
        logits = loaded(PROMPT).logits
        grown = private_bytes() - before
        size = archive.stat().st_size
        assert torch.equal(logits, wanted)
        assert grown < size / 4, f"{grown} bytes of its own for a model of {size}"

        # What is written is this process's own, page by page.
        loaded.get_parameter("model.embed_tokens.weight").zero_()
        assert torch.equal(from_pretrained(archive)(PROMPT).logits, wanted)
        print(f"logits equal; {size / 1e6:.0f} MB of weights, {grown / 1e6:.0f} MB of memory for them")


if __name__ == "__main__":
    main()
