"""One rank of test_transformers.py: python transformers_ranks.py FOLDER RANKS RANK DAEMON CASE ...

For each case whose checks hold on all ranks, there is a file FOLDER/CASE.done. The cases run in one process because the
import of transformers takes most of the time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tssd
from counting_proxy import CountingProxy
from equality import same
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.distributed import DistributedConfig
from transformers_models import (
    MyTrainer,
    StopAfter,
    logits,
    losses,
    make_config,
    make_model,
    train_arguments,
    train_data,
    train_model,
)
from tssd.transformers import lazy_state_dict

FOLDER, RANKS, RANK, DAEMON = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


def main() -> None:
    torch.set_num_threads(1)
    # accelerate requires an address, and does not connect to it: the process group exists.
    os.environ.update(RANK=str(RANK), LOCAL_RANK=str(RANK), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1")
    os.environ.update(LOCAL_WORLD_SIZE=str(RANKS), MASTER_PORT="1")
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/meet", world_size=RANKS, rank=RANK)
    for case in sys.argv[5:]:
        function, _, kind = case.partition("-")
        CASES[function](kind)
        dist.barrier()
        (FOLDER / f"{case}.done").touch()
    dist.destroy_process_group()


def model_class(config: Any) -> Any:
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def check_tensor_parallelism(kind: str) -> None:
    """Loads a model with a plan of tensor parallelism, through a proxy that counts the bytes of this rank."""
    proxy = CountingProxy(DAEMON)
    config = AutoConfig.from_pretrained(FOLDER / kind)
    with tssd.Store(proxy.address) as store, lazy_state_dict(store, f"ranks {kind}") as state_dict:
        overhead = proxy.received
        model = model_class(config).from_pretrained(
            None, config=config, state_dict=state_dict, distributed_config=DistributedConfig(tp_size=RANKS)
        )
        received = proxy.received - overhead
        total = sum(tensor.numel() * 4 for tensor in state_dict.values())
    own = sum(local(parameter).nbytes for parameter in model.parameters())
    print(kind, "parameters", own, "received", received, "of", total)
    assert own < 0.6 * total, (own, total)
    assert own <= received < own + 150 * len(state_dict), (received, own, total)
    expected = torch.load(FOLDER / kind / "logits.pt")
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    original = make_model(config).state_dict()
    for name, value in get_model_state_dict(model).items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(value, original[name]), name


def make_trainer(kind: str, folder: Path, seed: int, callbacks: Any = None) -> Any:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    model = train_model("llama", seed)
    if kind == "fsdp":
        model = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=model.state_dict(),
            distributed_config=DistributedConfig(fsdp_size=RANKS),
        )
    return MyTrainer(model, train_arguments(folder), train_dataset=train_data(), callbacks=callbacks)


def check_trainer(kind: str) -> None:
    """Compares 6 steps with 3 steps, a resume and 3 steps, with DDP or the FSDP2 of transformers."""
    folder = FOLDER / kind
    straight = make_trainer(kind, folder / "straight", 0)
    straight.train()
    assert any(isinstance(p, DTensor) for p in straight.model.parameters()) == (kind == "fsdp")
    first = make_trainer(kind, folder / "resumed", 0, [StopAfter(3)])
    first.train()
    resumed = make_trainer(kind, folder / "resumed", 8)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(straight), (losses(resumed), losses(straight))
    for (name, value), other in zip(straight.model.state_dict().items(), resumed.model.state_dict().values()):
        assert type(value) is type(other)
        assert same(local(value), local(other)), name
    names = {path.name for path in (folder / "resumed" / "checkpoint-6").iterdir()}
    assert {"rng_state_0.tssd", "rng_state_1.tssd", "scheduler.tssd", "trainer_state.json"} <= names, names
    assert ("shards" in names) == (kind == "fsdp") == ("model.tssd" not in names), names
    assert sorted(path.name for path in (folder / "resumed").iterdir()) == ["checkpoint-3", "checkpoint-6"]
    if kind == "fsdp":
        check_resume_of_unsharded(resumed, FOLDER / "ddp" / "resumed" / "checkpoint-6")
    whole = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in resumed.model.state_dict().items()
    }
    if RANK == 0:
        torch.save(whole, folder / "weights.pt")


def check_resume_of_unsharded(trainer: Any, folder: Path) -> None:
    """A sharded model takes weights that were not sharded. Its optimizer does not."""
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer._load_from_checkpoint(str(folder))
    whole = tssd.load_file(folder / "model.tssd")
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value.full_tensor(), whole[name]), name
    try:
        trainer._load_optimizer_and_scheduler(str(folder))
        raise AssertionError("the optimizer was loaded")
    except tssd.TssdUnsupportedError as error:
        assert "that was not sharded, and the model is sharded; resume without FSDP" in str(error)
    trainer.model.load_state_dict(before)


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def check_strided(_kind: str) -> None:
    """Saves the parameters of a model with tensor parallelism and FSDP2, some of which are strided shards."""
    config = make_config("mixtral")
    full = make_model(config).state_dict()
    with lazy_state_dict(FOLDER / "mixtral") as source:
        model = model_class(config).from_pretrained(
            None, config=config, state_dict=source, distributed_config=DistributedConfig(tp_size=2, fsdp_size=2)
        )
    state = get_model_state_dict(model)
    strided = {
        name
        for name, value in state.items()
        if isinstance(value, DTensor) and any(isinstance(p, _StridedShard) for p in value.placements)
    }
    assert any("gate_up_proj" in name for name in strided), strided
    tssd.save_file(state, FOLDER / f"{RANK}.tssd")
    with tssd.Store(str(FOLDER / "store")) as store:
        store.put_state_dict(state, "policy", wait=False).wait_visible(60)
        fresh = {name: value.clone().zero_() for name, value in state.items()}
        store.get_state_dict("policy", into=fresh)
        for name, value in fresh.items():
            assert same(local(value), local(state[name])), name
        assert all(torch.equal(store.get("policy", fqn=name), tensor) for name, tensor in full.items())


def check_strided_dcp(_kind: str) -> None:
    """Observes torch.distributed.checkpoint, which takes a strided shard for one box."""
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = torch.arange(16.0)
    tensor = distribute_tensor(whole, mesh, [_StridedShard(0, split_factor=2)])
    assert tensor.to_local().tolist() == [2.0 * RANK, 2 * RANK + 1, 2 * RANK + 8, 2 * RANK + 9]
    assert torch.equal(tssd_whole(tensor), whole)
    try:
        dcp.save({"w": tensor}, checkpoint_id=FOLDER / "dcp")
    except CheckpointException as error:
        assert "w has overlapping chunks" in str(error), error
    else:
        raise AssertionError("DCP saves strided shards now: correct docs/transformers.md")


def tssd_whole(tensor: DTensor) -> torch.Tensor:
    with tssd.Store(str(FOLDER / "one")) as store:
        store.put_state_dict({"w": tensor}, "w", wait=False).wait_visible(60)
        whole: torch.Tensor = store.get("w", fqn="w")
        return whole


CASES = {
    "tensor_parallelism": check_tensor_parallelism,
    "trainer": check_trainer,
    "strided": check_strided,
    "strided_dcp": check_strided_dcp,
}

main()
