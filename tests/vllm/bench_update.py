"""Measures weight updates of a vLLM engine on CPUs: through a store, and through the disk as vLLM itself does it.

Usage: python tests/vllm/bench_update.py [--layers N] [--rounds N]

Both run in turns in each round. The trainer is in this process, the engine has two tensor-parallel workers. The model
has the shape of Qwen2.5-0.5B. `pause` is the time for which the engine cannot serve, `all` the time from the trainer's
weights to the engine's. The engine post-processes its parameters in both. `without` leaves out the time of that.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# Workers run functions of this file.
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

import torch
from transformers import AutoModelForCausalLM, Qwen2Config
from tssd.vllm import LLMClient, TrainerInit
from vllm import LLM
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

WORKERS = 2


def watch(worker: Any) -> None:
    """Has a worker keep the records of its updates, and time the post-processing of its layers."""
    import functools
    import time

    import tssd

    worker.sync_records, worker.repack_seconds = [], 0.0
    tssd.on_sync(worker.sync_records.append)

    def timed(process: Any) -> Any:
        @functools.wraps(process)
        def run(*arguments: Any) -> None:
            started = time.monotonic()
            process(*arguments)
            worker.repack_seconds += time.monotonic() - started

        return run

    methods = {type(getattr(module, "quant_method", None)) for module in worker.model_runner.model.modules()}
    for method in methods - {type(None)}:
        method.process_weights_after_loading = timed(method.process_weights_after_loading)


def take_repack_seconds(worker: Any) -> float:
    """Returns the time of the post-processing since the last call."""
    seconds, worker.repack_seconds = worker.repack_seconds, 0.0
    return float(seconds)


def last_commit(worker: Any) -> tuple[float, float]:
    """Returns the time of the last commit, and that of a plain copy of as many bytes."""
    import time

    import torch

    record = worker.sync_records[-1]
    source = torch.ones(record.bytes_needed, dtype=torch.uint8)
    target = torch.zeros_like(source)
    started = time.monotonic()
    target.copy_(source)
    return record.commit_seconds, time.monotonic() - started


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4_864,
        num_hidden_layers=options.layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["Qwen2ForCausalLM"],
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    size = sum(parameter.nbytes for parameter in model.parameters())
    print(f"{size / 1e6:.0f} MB in {len(list(model.parameters()))} tensors, {WORKERS} workers", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="update-"))
    # vLLM reloads with the loader that it started with.
    model.save_pretrained(folder / "model")
    command = [os.environ.get("TSSD_BIN", "tssd"), "serve", "--socket", str(folder / "store")]
    with subprocess.Popen([*command, "--memory-limit", f"{4 * size}"], stdout=subprocess.DEVNULL) as daemon:
        while not (folder / "store").exists():
            time.sleep(0.1)
        llm = LLM(
            str(folder / "model"),
            weight_transfer_config={"backend": "tssd"},
            tensor_parallel_size=WORKERS,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=2,
        )
        try:
            measure(llm, model, f"unix:{folder}/store", folder / "model", options.rounds)
        finally:
            llm.llm_engine.engine_core.shutdown()
            daemon.terminate()


def measure(llm: LLM, model: Any, store: str, folder: Path, rounds: int) -> None:
    info = TrainerInit(store, "policy", rank=0)
    trainer: Any = WeightTransferTrainerFactory.trainer_init(info, client=LLMClient(llm), source=ModuleSource(model))
    llm.collective_rpc(watch)
    figures: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        figures.setdefault(name, []).append(seconds)

    for round_number in range(rounds + 1):
        if round_number == 1:
            # The first round warms up.
            figures.clear()
        started = time.monotonic()
        trainer.put()
        put = time.monotonic()
        trainer.stage()
        staged = time.monotonic()
        trainer.commit()
        committed = time.monotonic()
        repack = max(llm.collective_rpc(take_repack_seconds))
        commit, copy = (max(times) for times in zip(*llm.collective_rpc(last_commit)))
        note("tssd: put", put - started)
        note("tssd: stage", staged - put)
        note("tssd: pause", committed - staged)
        note("tssd: all", committed - started)
        note("tssd: post-processing", repack)
        note("tssd: pause without", committed - staged - repack)
        note("tssd: all without", committed - started - repack)
        note("commit / (copy + post-processing)", commit / (copy + repack))

        started = time.monotonic()
        model.save_pretrained(folder)
        saved = time.monotonic()
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        loaded = time.monotonic()
        repack = max(llm.collective_rpc(take_repack_seconds))
        note("disk: save", saved - started)
        note("disk: pause", loaded - saved)
        note("disk: all", loaded - started)
        note("disk: post-processing", repack)
        note("disk: pause without", loaded - saved - repack)
        note("disk: all without", loaded - started - repack)
    for part in ("pause", "all", "pause without", "all without"):
        pairs = zip(figures[f"disk: {part}"], figures[f"tssd: {part}"])
        note(f"disk / tssd: {part}", statistics.median(theirs / ours for theirs, ours in pairs))
    for name, values in figures.items():
        print(f"{name:36} {statistics.median(values):8.3f}  {min(values):8.3f} to {max(values):.3f}")
    trainer.shutdown()


if __name__ == "__main__":
    main()
