"""`tssd.transformers` with the real packages: lazy loading, trainers, accelerate, peft, and names of checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    # Of the packages that it imports.
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformers.trainer")

import tssd  # noqa: E402
from counting_proxy import CountingProxy  # noqa: E402
from equality import same  # noqa: E402
from processes import Daemon, retry_on_gloo_failure  # noqa: E402
from safetensors.torch import load_file as load_safetensors  # noqa: E402
from transformers import AutoModelForCausalLM, Trainer  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402
from transformers_models import (  # noqa: E402
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
from tssd.mapping import Mapping, fuse, narrow, stack, transpose  # noqa: E402
from tssd.transformers import (  # noqa: E402
    CheckpointOptions,
    LazyStateDict,
    hotswap_adapter,
    lazy_state_dict,
    mapping_of,
    register,
    save_adapter,
)

pytestmark = pytest.mark.filterwarnings("ignore")

HERE = Path(__file__).parent
KINDS = ("llama", "tied", "mixtral", "qwen3_moe")


class ListeningDaemon(Daemon):
    """A daemon that also serves TCP."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "socket", "--listen", "127.0.0.1:0")

    @property
    def tcp_address(self) -> str:
        return self.startup_line.split()[-1]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ListeningDaemon]:
    daemon = ListeningDaemon(tmp_path_factory.mktemp("daemon"))
    with daemon:
        yield daemon


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Returns a model, and its checkpoint as transformers writes it."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(make_config(request.param))
    model.save_pretrained(folder)
    return model, folder


# The ranks are forked after the import of transformers, which takes most of the time of a rank.
PRELOAD = "import runpy, sys, transformers_models; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"


@retry_on_gloo_failure
def run_preloaded_ranks(count: int, folder: Path, *arguments: str) -> None:
    """Runs `transformers_ranks.py`, as `run_ranks`."""
    (folder / "meet").unlink(missing_ok=True)
    launcher, script = (str(Path(__file__).with_name(name)) for name in ("fork_ranks.py", "transformers_ranks.py"))
    command = [sys.executable, "-W", "ignore", "-c", PRELOAD, launcher, script, str(folder), str(count), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(HERE)])}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        code = process.wait(timeout=300)
    except subprocess.TimeoutExpired:
        code = -1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    logs = "\n".join(f"{log.name}:\n{log.read_text()[-4000:]}" for log in sorted(folder.glob("*.log")))
    assert code == 0, logs


class Ranks:
    """The cases of `transformers_ranks.py` that have run in one group of processes."""

    def __init__(self, count: int, folder: Path, daemon: ListeningDaemon, cases: list[str]) -> None:
        self.folder = folder
        self._failure: AssertionError | None = None
        for kind in ("llama", "mixtral"):
            sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64} if count == 2 else {}
            model = make_model(make_config(kind, **sizes))
            model.save_pretrained(folder / kind)
            torch.save(logits(model), folder / kind / "logits.pt")
            with tssd.Store(f"unix:{daemon.socket}") as store:
                store.put_state_dict(load_safetensors(folder / kind / "model.safetensors"), f"ranks {kind}")
        try:
            run_preloaded_ranks(count, folder, daemon.tcp_address, *cases)
        except AssertionError as error:
            self._failure = error

    def check(self, case: str) -> None:
        if not (self.folder / f"{case}.done").exists():
            raise AssertionError(f"{case} has failed, or a case before it") from self._failure


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, daemon: ListeningDaemon) -> Ranks:
    # `from_pretrained` with distributed_config needs it.
    pytest.importorskip("accelerate")
    cases = ["tensor_parallelism-llama", "tensor_parallelism-mixtral", "trainer-ddp", "trainer-fsdp"]
    return Ranks(2, tmp_path_factory.mktemp("two"), daemon, cases)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory, daemon: ListeningDaemon) -> Ranks:
    pytest.importorskip("accelerate")
    return Ranks(4, tmp_path_factory.mktemp("four"), daemon, ["strided", "strided_dcp"])


def load_model(model: Any, state_dict: Any, **options: Any) -> Any:
    return type(model).from_pretrained(None, config=model.config, state_dict=state_dict, **options)


# Lazy state dicts


@pytest.mark.supports(
    "transformers",
    "`from_pretrained` reads lazily from archives, safetensors files and stores (directory, socket, TCP): "
    "Llama, Mixtral and Qwen3-MoE have equal logits",
)
@pytest.mark.parametrize("source", ["archive", "safetensors", "shards", "packed", "store", "daemon", "tcp", "module"])
def test_model_loaded_lazily_has_the_logits_of_its_source(
    checkpoint: tuple[Any, Path], source: str, tmp_path: Path, daemon: ListeningDaemon
) -> None:
    model, folder = checkpoint
    weights = load_safetensors(folder / "model.safetensors")
    if source == "archive":
        tssd.save_file(weights, tmp_path / "x.tssd")
        opened = lazy_state_dict(tmp_path / "x.tssd")
    elif source == "safetensors":
        opened = lazy_state_dict(str(folder))
    elif source == "shards":
        model.save_pretrained(tmp_path, max_shard_size="20KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
        opened = lazy_state_dict(tmp_path)
    elif source == "packed":
        tssd.save_file(weights, tmp_path / "x.tssd", compression="auto")
        opened = lazy_state_dict(tssd.safe_open(tmp_path / "x.tssd", "pt"))
    elif source == "module":
        # The names of the module, as TssdTrainerMixin stores them.
        tssd.save_file(model.state_dict(), tmp_path / "model.tssd")
        opened = lazy_state_dict(tmp_path)
    else:
        address = {"store": str(tmp_path), "daemon": f"unix:{daemon.socket}", "tcp": daemon.tcp_address}[source]
        key = f"lazy {source} {folder.name}"
        with tssd.Store(address) as store:
            store.put_state_dict(weights, key)
        opened = lazy_state_dict(address, key)
    with opened as state_dict:
        loaded, info = type(model).from_pretrained(
            None, config=model.config, state_dict=state_dict, output_loading_info=True
        )
    assert not any(info.values()), info
    assert torch.equal(logits(loaded), logits(model))
    assert not any(parameter.is_meta for parameter in loaded.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_dtype_is_that_of_the_stored_tensors(dtype: Any, tmp_path: Path) -> None:
    config = make_config("llama")
    model = make_model(config).to(dtype)
    config.dtype = None
    state = {"a": torch.arange(3), **model.state_dict()}
    tssd.save_file(state, tmp_path / "x.tssd")
    with lazy_state_dict(tmp_path / "x.tssd") as state_dict:
        loaded = type(model).from_pretrained(None, config=config, state_dict=state_dict, dtype="auto")
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert torch.equal(logits(loaded), logits(load_model(model, model.state_dict(), dtype=dtype)))


def test_loaded_parameters_can_be_trained_and_change_no_stored_byte(tmp_path: Path) -> None:
    model = make_model(make_config("llama"))
    tssd.save_file(model.state_dict(), tmp_path / "x.tssd")
    with tssd.Store(str(tmp_path / "store")) as store:
        store.put_state_dict(model.state_dict(), "policy")
        for source in (lazy_state_dict(tmp_path / "x.tssd"), lazy_state_dict(store, "policy")):
            with source as state_dict:
                loaded = load_model(model, state_dict)
            with torch.no_grad():
                for parameter in loaded.parameters():
                    parameter.zero_()
        assert all(same(a, b) for a, b in zip(store.get_state_dict("policy").values(), model.state_dict().values()))
    assert same(dict(tssd.load_file(tmp_path / "x.tssd")), dict(model.state_dict()))


INDICES: list[Any] = [
    ..., 0, -1, 3, slice(None), slice(2, 5), slice(-3, None), slice(0, 0), slice(1, 6, 2), slice(9, 99),
    (0, 0), (..., 0), (0, ...), (slice(1, 3), ..., slice(0, 2)), (..., slice(1, 2), 2), (slice(2), 1, slice(None)),
    (slice(None), slice(1, 4, 3)), (1, slice(2, 3)), (-2, -1),
]  # fmt: skip


@pytest.fixture(scope="module")
def sliced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, dict[str, LazyStateDict]]]:
    """Returns a tensor, and it in state dicts of all kinds, also assembled of parts by a mapping."""
    folder = tmp_path_factory.mktemp("sliced")
    whole = torch.arange(6 * 4 * 5, dtype=torch.int32).reshape(6, 4, 5)
    tssd.save_file({"x": whole, "flat": whole[0]}, folder / "x.tssd")
    parts = {f"part.{n}.{half}": whole[n].chunk(2, 0)[half].clone() for n in range(6) for half in range(2)}
    parts["turned"] = whole.transpose(0, 2).contiguous()
    parts["more"] = torch.cat([whole, whole + 1000], dim=1)
    tssd.save_file(parts, folder / "parts.tssd")
    with tssd.Store(str(folder / "store")) as store:
        store.put_state_dict({"x": whole}, "key")
        store.put_state_dict(parts, "parts")
        stacked = stack(fuse("part.{n}.0", "part.{n}.1"), over="n")
        mapping = Mapping({"x": stacked, "y": transpose("turned", 0, 2), "z": narrow("more", 1, 0, 4)})
        with (
            lazy_state_dict(folder / "x.tssd") as file,
            lazy_state_dict(store, "key") as version,
            lazy_state_dict(store, "parts", mapping=mapping) as mapped,
            lazy_state_dict(folder / "parts.tssd", mapping=mapping) as mapped_file,
        ):
            assert list(mapped) == list(mapped_file) == ["x", "y", "z"]
            yield whole, {"file": file, "version": version, "mapped": mapped, "mapped file": mapped_file}


@pytest.mark.parametrize("index", INDICES, ids=repr)
def test_index_reads_as_that_of_the_tensor(sliced: tuple[Any, dict[str, LazyStateDict]], index: Any) -> None:
    whole, state_dicts = sliced
    for kind, state_dict in state_dicts.items():
        for name, lazy in state_dict.items():
            if name == "flat":
                continue
            assert (lazy.get_shape(), lazy.shape, lazy.ndim) == ([6, 4, 5], whole.shape, 3)
            assert (lazy.dtype, lazy.get_dtype(), lazy.device) == (torch.int32, "I32", torch.device("cpu"))
            assert not lazy.is_floating_point() and lazy.numel() == 120
            part = lazy[index]
            assert part.dtype == whole.dtype and torch.equal(part, whole[index]), (kind, name)


@pytest.mark.parametrize("index", [6, (0, 4), (0, 0, 0, 0), (0, -5)], ids=repr)
def test_index_out_of_range_is_an_index_error(sliced: tuple[Any, dict[str, LazyStateDict]], index: Any) -> None:
    for state_dict in sliced[1].values():
        with pytest.raises(IndexError):
            state_dict["x"][index]


def test_threads_read_at_the_same_time(sliced: tuple[Any, dict[str, LazyStateDict]]) -> None:
    whole, state_dicts = sliced

    def read(number: int) -> bool:
        kind = list(state_dicts)[number % len(state_dicts)]
        index = INDICES[number % len(INDICES)]
        return torch.equal(state_dicts[kind]["x"][index], whole[index])

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, range(2000)))


def test_failure_while_a_model_loads_is_that_of_the_source(tmp_path: Path) -> None:
    model = make_model(make_config("mixtral"))
    model.save_pretrained(tmp_path)
    weights = load_safetensors(tmp_path / "model.safetensors")
    tssd.save_file(weights, tmp_path / "x.tssd")
    state_dict = lazy_state_dict(tmp_path / "x.tssd")
    state_dict.close()
    with pytest.raises(tssd.TssdValueError, match="load the model inside the `with` block"):
        load_model(model, state_dict)
    # A flipped bit of an expert.
    with tssd.safe_open(tmp_path / "x.tssd", "pt") as file:
        name = file.offset_keys()[len(weights) // 2]
    content = bytearray((tmp_path / "x.tssd").read_bytes())
    content[content.index(weights[name].numpy().tobytes()) + 5] ^= 1
    (tmp_path / "x.tssd").write_bytes(content)
    with lazy_state_dict(tmp_path / "x.tssd") as state_dict, pytest.raises(tssd.TssdCorruptError, match=name):
        load_model(model, state_dict)


def test_index_transfers_only_its_box(daemon: ListeningDaemon) -> None:
    whole = torch.randn(1024, 1024)
    proxy = CountingProxy(daemon.tcp_address)
    with tssd.Store(f"unix:{daemon.socket}") as store:
        store.put_state_dict({"w": whole}, "boxes")
    with tssd.Store(proxy.address) as store, lazy_state_dict(store, "boxes") as state_dict:
        lazy = state_dict["w"]
        opened = proxy.received
        columns, corner = (slice(None), slice(0, 128)), (slice(512, 1024), slice(0, 512))
        for index in (slice(256, 384), columns, (5, slice(7, 9)), corner):
            before = proxy.received
            part = lazy[index]
            assert torch.equal(part, whole[index])
            received = proxy.received - before
            assert part.nbytes <= received < 1.1 * part.nbytes + 4096, (index, received, part.nbytes)
    assert opened < 65536
    proxy.close()


def test_closed_state_dict_releases_its_version(tmp_path: Path) -> None:
    with tssd.Store(str(tmp_path)) as store:
        store.put_state_dict({"w": torch.zeros(4)}, "key")
        state_dict = lazy_state_dict(store, "key")
        assert repr(state_dict) == "LazyStateDict(version 1 of key `key`, 1 tensors)"
        tensor = state_dict["w"]
        # An open version is leased: newer ones, and its deletion, do not take it from its reader.
        store.put_state_dict({"w": torch.ones(4)}, "key")
        store.delete("key", 1)
        assert torch.equal(tensor[...], torch.zeros(4))
        state_dict.close()
        state_dict.close()
        assert "closed" in repr(state_dict)
        text = "cannot read `w`: the state dict of version 1 of key `key` is closed; load the model inside"
        with pytest.raises(tssd.TssdValueError, match=text):
            tensor[...]
        with pytest.raises(tssd.TssdKeyError):
            lazy_state_dict(store, "key", version=1)


def test_lazy_state_dict_refuses_what_it_cannot_open(tmp_path: Path) -> None:
    tssd.save_file({"w": torch.zeros(2, 2)}, tmp_path / "x.tssd")
    with tssd.Store(str(tmp_path / "store")) as store:
        store.put_state_dict({"w": torch.zeros(4)}, "key")
        with pytest.raises(tssd.TssdKeyError, match="other"):
            lazy_state_dict(store, "other")
        with pytest.raises(tssd.TssdValueError, match="give key="):
            lazy_state_dict(store)
        with tssd.safe_open(tmp_path / "x.tssd", "pt") as file:
            with pytest.raises(tssd.TssdValueError, match="`key` has no meaning"):
                lazy_state_dict(file, "key")
    with pytest.raises(tssd.TssdValueError, match="`version`, `names` and `timeout` have no meaning"):
        lazy_state_dict(tmp_path / "x.tssd", version=1)
    with pytest.raises(tssd.TssdFileNotFoundError):
        lazy_state_dict(tmp_path / "missing.tssd")
    with pytest.raises(tssd.TssdKeyError, match=r"has no model\.tssd, model\.safetensors"):
        lazy_state_dict(tmp_path)
    (tmp_path / "bad.safetensors").write_bytes(b"no header")
    with pytest.raises(tssd.TssdCorruptError, match="bad.safetensors"):
        lazy_state_dict(tmp_path / "bad.safetensors")
    with lazy_state_dict(tmp_path / "x.tssd") as state_dict:
        with pytest.raises(tssd.TssdKeyError, match="has no tensor `v`"):
            state_dict["v"]
        assert state_dict.get("v") is None and "v" not in state_dict
    for rules, error, text in (
        ({"v": fuse("w", "u")}, tssd.TssdKeyError, "`u` is not stored"),
        ({"v": narrow("w", 0, 1, 2)}, tssd.TssdValueError, "no elements 1..3"),
    ):
        with pytest.raises(error, match=text):
            lazy_state_dict(tmp_path / "x.tssd", mapping=Mapping(rules))


def test_model_loads_from_names_of_another_program(tmp_path: Path) -> None:
    model = make_model(make_config("llama"))
    layer = "model.layers.{n}.self_attn."
    state = {}
    for name, tensor in model.state_dict().items():
        head, _, rest = name.partition(".self_attn.q_proj")
        if rest:
            parts = [model.state_dict()[f"{head}.self_attn.{x}_proj.weight"] for x in "qkv"]
            state["policy." + head + ".qkv"] = torch.cat(parts)
        elif "k_proj" not in name and "v_proj" not in name:
            state["policy." + name] = tensor
    fused = "policy.model.layers.{n}.qkv"
    mapping = Mapping(
        {
            layer + "q_proj.weight": narrow(fused, 0, 0, 32),
            layer + "k_proj.weight": narrow(fused, 0, 32, 16),
            layer + "v_proj.weight": narrow(fused, 0, 48, 16),
            "{name:path}": "policy.{name}",
        }
    )
    with tssd.Store(str(tmp_path)) as store:
        store.put_state_dict(state, "policy")
        with lazy_state_dict(store, "policy", mapping=mapping) as state_dict:
            assert sorted(state_dict) == sorted(model.state_dict())
            assert torch.equal(logits(load_model(model, state_dict)), logits(model))


@pytest.mark.supports(
    "transformers", "with tensor parallelism, each of two ranks receives the bytes of its shard, within 5 %"
)
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_each_rank_pulls_only_its_shard(two_ranks: Ranks, kind: str) -> None:
    """Tensor parallelism of transformers on 2 ranks: a rank receives the bytes of its parameters, and no others."""
    two_ranks.check(f"tensor_parallelism-{kind}")


# Names of checkpoints


@pytest.mark.supports(
    "transformers", "`mapping_of`: a put stores what `save_pretrained` writes, byte for byte (Llama, Mixtral, Qwen3-MoE)"
)
@pytest.mark.parametrize("of", ["model", "config"])
def test_put_with_the_mapping_stores_what_save_pretrained_writes(
    checkpoint: tuple[Any, Path], of: str, tmp_path: Path
) -> None:
    model, folder = checkpoint
    mapping = mapping_of(model if of == "model" else model.config)
    if model.config.model_type == "llama":
        assert mapping == Mapping({})
    expected = load_safetensors(folder / "model.safetensors")
    with tssd.Store(str(tmp_path)) as store:
        # Tied parameters have one name in both.
        store.put_state_dict(dict(model.named_parameters()), "policy", mapping=mapping)
        stored = {name: tensor.detach() for name, tensor in store.get_state_dict("policy").items()}
        assert stored.keys() == expected.keys()
        assert all(same(stored[name], tensor) for name, tensor in expected.items())
        # The same mapping reads a checkpoint into a module.
        fresh = make_model(model.config, seed=9)
        store.get_state_dict("policy", into=dict(fresh.named_parameters()), mapping=mapping)
        assert torch.equal(logits(fresh), logits(model))


def test_mapping_of_fused_checkpoints_puts_shards_of_the_stored_tensors(tmp_path: Path) -> None:
    """The module has the parts, and the checkpoint the fused tensors."""
    config = transformers.HrmTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, head_dim=8
    )
    model = make_model(config)
    model.save_pretrained(tmp_path)
    expected = load_safetensors(tmp_path / "model.safetensors")
    with tssd.Store(str(tmp_path / "store")) as store:
        store.put_state_dict(dict(model.named_parameters()), "policy", mapping=mapping_of(model))
        stored = store.get_state_dict("policy")
        assert stored.keys() == expected.keys()
        assert all(same(stored[name].detach(), tensor) for name, tensor in expected.items())


def test_mapping_of_computed_conversions_names_the_operation() -> None:
    for cls, operation in (
        (transformers.Inkling2ForCausalLM, "Interleave"),
        (transformers.Ernie4_5_VLMoeModel, "ErnieSplitAndDecoupleTextVisionExperts"),
    ):
        with torch.device("meta"):
            model = cls(cls.config_class())
        with pytest.raises(tssd.TssdUnsupportedError, match=f"transformers converts them by {operation}; put them as"):
            mapping_of(model)
    with pytest.raises(tssd.TssdTypeError, match="Linear is no model of transformers; give the model without its"):
        mapping_of(torch.nn.Linear(2, 2))


# Trainer


def fit(trainer: Any, resume: Any = None) -> Any:
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def make_trainer(
    cls: Any, folder: Path, seed: int = 0, model: Any = None, callbacks: Any = None, **changes: Any
) -> Any:
    pytest.importorskip("accelerate")
    options = changes.pop("checkpoint_options", None)
    keywords = {} if options is None else {"checkpoint_options": options}
    model = train_model(seed=seed) if model is None else model
    data = train_data()
    arguments = train_arguments(folder, **changes)
    return cls(model=model, args=arguments, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks, **keywords)


def weights(trainer: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, Any], dict[str, Any]]:
    """Returns the losses and the weights of 6 steps of `Trainer`, without interruption."""
    trainer = fit(make_trainer(Trainer, tmp_path_factory.mktemp("straight"), save_strategy="no"))
    return losses(trainer), weights(trainer)


FILES = {
    "config.json", "generation_config.json", "model.tssd", "optimizer.tssd", "rng_state.tssd", "scheduler.tssd",
    "trainer_state.json", "training_args.json",
}  # fmt: skip


@pytest.mark.supports(
    "transformers", "a resumed `Trainer` has the losses and weights of one without interruption, bit for bit"
)
@pytest.mark.parametrize("compression", [None, "auto"])
def test_resumed_training_equals_an_uninterrupted_one(
    straight: tuple[dict[int, Any], dict[str, Any]], compression: Any, tmp_path: Path
) -> None:
    options = CheckpointOptions(compression=compression)
    first = fit(make_trainer(MyTrainer, tmp_path, callbacks=[StopAfter(3)], checkpoint_options=options))
    assert losses(first) == {step: straight[0][step] for step in (1, 2, 3)}
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-3"}
    assert {path.name for path in (tmp_path / "checkpoint-3").iterdir()} == FILES
    torch.manual_seed(99)
    resumed = fit(make_trainer(MyTrainer, tmp_path, seed=8, checkpoint_options=options), True)
    assert losses(resumed) == straight[0]
    assert same(weights(resumed), straight[1])
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-3", "checkpoint-6"}
    assert same(tssd.load_file(tmp_path / "checkpoint-6" / "optimizer.tssd"), resumed.optimizer.state_dict())


def test_checkpoint_is_a_source_of_a_lazy_state_dict(tmp_path: Path) -> None:
    trainer = fit(make_trainer(MyTrainer, tmp_path))
    folder = tmp_path / "checkpoint-6"
    config = transformers.AutoConfig.from_pretrained(folder)
    with lazy_state_dict(folder) as state_dict:
        loaded = transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state_dict)
    assert same(dict(loaded.state_dict()), weights(trainer))


def test_checkpoint_of_trainer_is_resumed(straight: tuple[dict[int, Any], dict[str, Any]], tmp_path: Path) -> None:
    fit(make_trainer(Trainer, tmp_path, callbacks=[StopAfter(3)]))
    resumed = fit(make_trainer(MyTrainer, tmp_path, seed=8), True)
    assert (losses(resumed), same(weights(resumed), straight[1])) == (straight[0], True)


def test_mixture_of_experts_resumes(tmp_path: Path) -> None:
    straight = fit(make_trainer(Trainer, tmp_path / "a", model=train_model("mixtral"), save_strategy="no"))
    fit(make_trainer(MyTrainer, tmp_path / "b", model=train_model("mixtral"), callbacks=[StopAfter(3)]))
    resumed = fit(make_trainer(MyTrainer, tmp_path / "b", model=train_model("mixtral", 8)), True)
    assert losses(resumed) == losses(straight) and same(weights(resumed), weights(straight))


def test_limit_and_best_model_are_those_of_trainer(tmp_path: Path) -> None:
    """The same checkpoints remain, and the same best model is loaded, as with `Trainer`."""
    results = []
    for cls in (Trainer, MyTrainer):
        options: dict[str, Any] = {
            "save_steps": 1, "eval_steps": 1, "eval_strategy": "steps", "load_best_model_at_end": True,
            "save_total_limit": 2, "metric_for_best_model": "loss", "greater_is_better": True,
        }  # fmt: skip
        folder = tmp_path / cls.__name__
        trainer = fit(make_trainer(cls, folder, **options))
        names = sorted(path.name for path in folder.iterdir())
        best = Path(trainer.state.best_model_checkpoint)
        assert best.parent == folder and best.is_dir()
        states = [json.loads((folder / name / "trainer_state.json").read_text()) for name in names]
        recorded = [Path(state["best_model_checkpoint"]).name for state in states]
        results.append((names, best.name, recorded, weights(trainer)))
    assert results[0][:3] == results[1][:3]
    assert same(results[0][3], results[1][3])
    # The best one is not the last one: it is loaded from its archive.
    assert results[1][1] != results[1][0][-1]


class Crash(BaseException):
    """An end of the process that no handler of `Exception` catches."""


@pytest.mark.supports("transformers", "a crash during a save leaves the last complete checkpoint")
def test_interrupted_save_leaves_the_last_complete_checkpoint(
    straight: tuple[dict[int, Any], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each archive of the second save in turn is the one at which the process ends."""
    from tssd.transformers import _trainer

    fit(make_trainer(MyTrainer, tmp_path, callbacks=[StopAfter(3)]))
    shutil.copytree(tmp_path / "checkpoint-3", tmp_path.with_suffix(".kept"))
    points = 0
    for point in itertools.count():
        calls = itertools.count()

        def save(state: Any, path: Path, calls: Any = calls, point: int = point, **options: Any) -> Any:
            if next(calls) == point:
                path.write_bytes(b"half")
                raise Crash
            return tssd.save_file(state, path, **options)

        monkeypatch.setattr(_trainer, "save_file", save)
        trainer = make_trainer(MyTrainer, tmp_path, seed=8)
        try:
            fit(trainer, True)
            break
        except Crash:
            points += 1
        assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-3")
        kept = tmp_path.with_suffix(".kept")
        names = [path.name for path in kept.iterdir()]
        assert all((kept / name).read_bytes() == (tmp_path / "checkpoint-3" / name).read_bytes() for name in names)
    assert points == 4
    assert (losses(trainer), same(weights(trainer), straight[1])) == (straight[0], True)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-3", "checkpoint-6"}


def test_killed_process_leaves_the_last_complete_checkpoint(tmp_path: Path) -> None:
    class Killed(MyTrainer):
        def _save_rng_state(self, output_dir: str) -> None:
            if self.state.global_step == 6:
                os.kill(os.getpid(), signal.SIGKILL)
            super()._save_rng_state(output_dir)

    pytest.importorskip("accelerate")
    torch.set_num_threads(1)
    child = os.fork()
    if child == 0:
        try:
            fit(make_trainer(Killed, tmp_path))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-3")
    resumed = fit(make_trainer(MyTrainer, tmp_path, seed=8), True)
    assert resumed.state.global_step == 6 and not (tmp_path / ".incomplete").exists()


def test_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    fit(make_trainer(MyTrainer, tmp_path, seed=1))
    second = fit(make_trainer(MyTrainer, tmp_path, seed=2))
    assert same(dict(tssd.load_file(tmp_path / "checkpoint-6" / "model.tssd")), weights(second))
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-3", "checkpoint-6"}


def test_scaler_is_saved_and_restored(tmp_path: Path) -> None:
    trainer = make_trainer(MyTrainer, tmp_path)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer._save_scaler(str(tmp_path))
    other = make_trainer(MyTrainer, tmp_path)
    other.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    other._load_scaler(str(tmp_path))
    assert other.accelerator.scaler.state_dict() == trainer.accelerator.scaler.state_dict()
    assert other.accelerator.scaler.get_scale() == 1024.0


def test_checkpoint_goes_to_a_store_too(tmp_path: Path) -> None:
    config = make_config("mixtral")
    with tssd.Store(str(tmp_path / "store")) as store:
        model = make_model(config)
        options = CheckpointOptions(store=store, key="policy", mapping=mapping_of(model))
        trainer = fit(make_trainer(MyTrainer, tmp_path / "run", model=model, checkpoint_options=options))
        with lazy_state_dict(store, "policy") as state_dict:
            loaded = load_model(model, state_dict)
            assert any("experts.3.w1" in name for name in state_dict)
        assert torch.equal(logits(loaded), logits(trainer.model.eval()))
        head = store.head("policy")
        assert head is not None and head.metadata == {"global_step": 6}
    with pytest.raises(tssd.TssdValueError, match="give both"):
        CheckpointOptions(key="policy")


def test_checkpoint_that_does_not_fit_changes_no_weight(tmp_path: Path) -> None:
    fit(make_trainer(MyTrainer, tmp_path, callbacks=[StopAfter(3)]))
    folder = tmp_path / "checkpoint-3"
    state = tssd.load_file(folder / "model.tssd")
    name = "model.layers.1.mlp.up_proj.weight"
    cases: list[tuple[Any, Any, str]] = [
        ({**state, "extra": torch.zeros(2)}, tssd.TssdValueError, "`extra`, which LlamaForCausalLM lacks"),
        ({key: value for key, value in state.items() if key != name}, tssd.TssdKeyError, f"lacks `{name}`, which"),
        ({**state, name: torch.zeros(3)}, tssd.TssdValueError, rf"`{name}` has shape \[3\] in the archive, and \[64"),
        ({**state, name: 5}, tssd.TssdValueError, f"`{name}`"),
    ]
    for content, error, text in cases:
        tssd.save_file(content, folder / "model.tssd")
        trainer = make_trainer(MyTrainer, tmp_path, seed=8)
        before = weights(trainer)
        with pytest.raises(error, match=text) as info:
            fit(trainer, True)
        assert "resume with the model that wrote the checkpoint" in str(info.value)
        assert str(folder / "model.tssd") in str(info.value)
        assert same(weights(trainer), before)
    (folder / "model.tssd").write_bytes((folder / "optimizer.tssd").read_bytes()[:5000])
    with pytest.raises(tssd.TssdCorruptError):
        fit(make_trainer(MyTrainer, tmp_path), True)


def test_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    trainer = make_trainer(MyTrainer, tmp_path)
    with pytest.raises(tssd.TssdValueError, match=r"`.*/empty` is no checkpoint: it has no model\.tssd"):
        fit(trainer, str(tmp_path / "empty"))
    with pytest.raises(tssd.TssdValueError, match="is no checkpoint: it does not exist"):
        fit(trainer, str(tmp_path / "missing"))


def test_full_disk_leaves_no_checkpoint(tmp_path: Path, limit_file_size: Any) -> None:
    trainer = make_trainer(MyTrainer, tmp_path, callbacks=[StopAfter(3)])
    limit_file_size(100_000)
    with pytest.raises(tssd.TssdOSError, match="model.tssd|optimizer.tssd"):
        fit(trainer)
    assert get_last_checkpoint(str(tmp_path)) is None


def test_object_that_archives_cannot_hold_needs_pickle(tmp_path: Path) -> None:
    class Odd(MyTrainer):
        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            self._save_archive({"odd": object()}, Path(output_dir) / "odd.tssd")

    with pytest.raises(tssd.TssdTypeError, match="odd"):
        fit(make_trainer(Odd, tmp_path / "a"))
    assert get_last_checkpoint(str(tmp_path / "a")) is None
    fit(make_trainer(Odd, tmp_path / "b", checkpoint_options=CheckpointOptions(allow_pickle=True)))
    assert (tmp_path / "b" / "checkpoint-6" / "odd.tssd").exists()


@pytest.mark.parametrize("backend", ["FSDP1", "DeepSpeed"])
def test_backend_with_its_own_checkpoints_is_refused(backend: str, tmp_path: Path) -> None:
    trainer = make_trainer(MyTrainer, tmp_path)
    trainer.is_fsdp_enabled, trainer.is_deepspeed_enabled = backend == "FSDP1", backend == "DeepSpeed"
    with pytest.raises(tssd.TssdUnsupportedError, match=f"MyTrainer cannot save checkpoints of {backend} as archives"):
        trainer._check_supported()


def test_saved_model_of_a_user_is_safetensors(tmp_path: Path) -> None:
    trainer = make_trainer(MyTrainer, tmp_path)
    trainer.save_model(str(tmp_path / "export"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert same(dict(loaded.state_dict()), weights(trainer))


@pytest.mark.supports("transformers", "the same on two ranks, with DDP and with FSDP2 of transformers")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_training_of_two_ranks_resumes(two_ranks: Ranks, kind: str) -> None:
    two_ranks.check(f"trainer-{kind}")


def test_shards_are_resumed_without_sharding(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.check("trainer-fsdp")
    folder = two_ranks.folder / "fsdp"
    trainer = make_trainer(MyTrainer, tmp_path, model=train_model("llama", 8), max_steps=7)
    trainer._load_from_checkpoint(str(folder / "resumed" / "checkpoint-6"))
    assert same(weights(trainer), torch.load(folder / "weights.pt"))
    fit(trainer, str(folder / "resumed" / "checkpoint-6"))
    with lazy_state_dict(folder / "resumed" / "checkpoint-6") as state_dict:
        assert same({name: tensor[...] for name, tensor in state_dict.items()}, torch.load(folder / "weights.pt"))
    moments = [state["step"].item() for state in trainer.optimizer.state_dict()["state"].values()]
    assert trainer.state.global_step == 7 and set(moments) == {7}


# accelerate


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.embedding(x)))


def make_accelerated(seed: int) -> tuple[Any, list[Any], Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(seed)
    models = [Tied(), torch.nn.Linear(3, 2)]
    optimizer = torch.optim.AdamW([*models[0].parameters(), *models[1].parameters()], lr=0.1)
    *models, optimizer = accelerator.prepare(*models, optimizer)
    return accelerator, models, optimizer


def step(models: list[Any], optimizer: Any, seed: int) -> float:
    torch.manual_seed(seed)
    loss = models[0](torch.randint(0, 16, (4,))).square().mean() + models[1](torch.randn(5, 3)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


@pytest.mark.supports("accelerate", "`save_state` and `load_state` of two models, with tied weights")
def test_accelerator_saves_two_models_with_tied_weights(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    accelerator, models, optimizer = make_accelerated(1)
    registration = register(accelerator)
    step(models, optimizer, 0)
    accelerator.save_state(str(tmp_path / "state"))
    names = {path.name for path in (tmp_path / "state").iterdir()}
    assert {"model.tssd", "model_1.tssd"} <= names and not any("safetensors" in name for name in names)
    expected = [step(models, optimizer, seed) for seed in (1, 2)]

    other, other_models, other_optimizer = make_accelerated(2)
    other_registration = register(other, compression="auto")
    other.load_state(str(tmp_path / "state"))
    assert other_models[0].head.weight is other_models[0].embedding.weight
    assert [step(other_models, other_optimizer, seed) for seed in (1, 2)] == expected
    for model, other_model in zip(models, other_models):
        assert same(dict(model.state_dict()), dict(other_model.state_dict()))

    # Without the hooks, accelerate writes its own format, which a registered accelerator reads too.
    registration.remove()
    accelerator.save_state(str(tmp_path / "plain"))
    assert not list((tmp_path / "plain").glob("*.tssd"))
    other.load_state(str(tmp_path / "plain"))
    assert same(dict(models[0].state_dict()), dict(other_models[0].state_dict()))
    other_registration.remove()


@pytest.mark.supports("accelerate", "weights of other models are refused")
def test_accelerator_refuses_weights_of_other_models(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    accelerator, models, _ = make_accelerated(1)
    register(accelerator)
    accelerator.save_state(str(tmp_path))
    before = [dict(model.state_dict()) for model in models]
    tssd.save_file({"weight": torch.zeros(2, 3)}, tmp_path / "model_1.tssd")
    with pytest.raises(tssd.TssdKeyError, match="lacks `bias`, which Linear has"):
        accelerator.load_state(str(tmp_path))
    (tmp_path / "model_1.tssd").unlink()
    with pytest.raises(tssd.TssdKeyError, match="has not the weights of 2 models"):
        accelerator.load_state(str(tmp_path))
    assert same(before, [dict(model.state_dict()) for model in models])


# peft


def make_adapter(seed: int, rank: int = 4, alpha: int = 8, modules: Any = ("q_proj", "v_proj"), **options: Any) -> Any:
    """Returns the same base model for each seed, with an adapter that is not zero."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(modules), **options)
    model = get_peft_model(make_model(make_config("llama")), config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    return model.eval()


@pytest.mark.supports(
    "peft", "a LoRA adapter is swapped in place from an archive or a store: other rank, alpha and modules"
)
@pytest.mark.parametrize("target", ["archive", "store", "daemon"])
@pytest.mark.parametrize("change", [{}, {"alpha": 32}, {"rank": 2}, {"rank": 6}, {"modules": ["q_proj"]}], ids=repr)
def test_swapped_adapter_has_the_outputs_of_its_source(
    target: str, change: dict[str, Any], tmp_path: Path, daemon: ListeningDaemon
) -> None:
    pytest.importorskip("peft")
    from peft import get_peft_model_state_dict

    model, source = make_adapter(1), make_adapter(2, **change)
    assert not torch.equal(logits(model), logits(source))
    if target == "archive":
        save_adapter(source, tmp_path / "x.tssd")
        assert hotswap_adapter(model, tmp_path / "x.tssd") is None
    else:
        address = str(tmp_path) if target == "store" else f"unix:{daemon.socket}"
        key = f"adapter {change}"
        with tssd.Store(address) as store:
            save_adapter(source, store, key)
            assert hotswap_adapter(model, store, key) == 1
    if change.keys() & {"rank", "modules"}:
        # peft fills the rest of a smaller rank with zeros, and adapters of other modules.
        torch.testing.assert_close(logits(model), logits(source))
    else:
        assert torch.equal(logits(model), logits(source))
        assert same(get_peft_model_state_dict(model), get_peft_model_state_dict(source))


def test_adapters_of_several_versions_are_swapped_under_another_name(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = make_adapter(0)
    model.add_adapter("live", model.peft_config["default"])
    model.set_adapter("live")
    sources = [make_adapter(seed) for seed in (1, 2, 3)]
    with tssd.Store(str(tmp_path)) as store:
        for number, source in enumerate(sources, 1):
            save_adapter(source, str(tmp_path), "adapter")
            store.pin("adapter", f"step {number}")
        for version in (2, "step 1", 3):
            number = hotswap_adapter(model, store, "adapter", version=version, adapter_name="live")
            assert number == int(str(version)[-1])
            assert torch.equal(logits(model), logits(sources[number - 1]))
    save_adapter(sources[0], str(tmp_path), "adapter")
    compiled = torch.compile(model, backend="eager")
    assert hotswap_adapter(compiled, str(tmp_path), "adapter", adapter_name="live") == 4
    assert torch.equal(logits(compiled), logits(sources[0]))
    # The other adapter stays as it is.
    model.set_adapter("default")
    assert torch.equal(logits(model), logits(make_adapter(0)))


@pytest.mark.supports("peft", "an adapter that does not fit is named, and changes nothing")
def test_adapter_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = make_adapter(1)
    before = weights_of_adapter(model)
    cases: list[tuple[Any, str]] = [
        (make_adapter(2, modules=("q_proj", "o_proj")), "the model has no `.*o_proj.lora_A.default.weight`"),
        (make_adapter(2, use_rslora=True), "use_rslora"),
    ]
    for source, text in cases:
        save_adapter(source, tmp_path / "x.tssd")
        with pytest.raises(tssd.TssdValueError, match=text):
            hotswap_adapter(model, tmp_path / "x.tssd")
    state = peft.get_peft_model_state_dict(make_adapter(2))
    name = next(iter(state))
    tssd.save_file(state, tmp_path / "x.tssd")
    with pytest.raises(tssd.TssdValueError, match="has no configuration of an adapter; store it with save_adapter"):
        hotswap_adapter(model, tmp_path / "x.tssd")
    tssd.save_file({**state, name: torch.zeros(4, 7)}, tmp_path / "x.tssd")
    with pytest.raises(tssd.TssdValueError, match=r"has shape \[4, 7\], and \[4, 32\] in the model"):
        hotswap_adapter(model, tmp_path / "x.tssd", config=model.peft_config["default"])
    tssd.save_file({}, tmp_path / "x.tssd")
    with pytest.raises(tssd.TssdValueError, match="no name has `lora_`"):
        hotswap_adapter(model, tmp_path / "x.tssd", config=model.peft_config["default"])
    assert same(weights_of_adapter(model), before)
    with pytest.raises(tssd.TssdKeyError, match=r"has no adapter `other`: it has \['default'\]"):
        hotswap_adapter(model, tmp_path / "x.tssd", adapter_name="other")
    with pytest.raises(tssd.TssdKeyError, match="has no adapter `default`: it has none"):
        save_adapter(make_model(make_config("llama")), tmp_path / "x.tssd")
    with tssd.Store(str(tmp_path / "store")) as store:
        with pytest.raises(tssd.TssdKeyError, match="adapter"):
            hotswap_adapter(model, store, "adapter")
        with pytest.raises(tssd.TssdValueError, match="give key="):
            hotswap_adapter(model, store)


def weights_of_adapter(model: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if "lora_" in name}


@pytest.mark.supports("peft", "training of an adapter resumes")
def test_trainer_of_an_adapter_resumes(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    straight = fit(make_trainer(Trainer, tmp_path / "a", model=make_adapter(1, lora_dropout=0.3), save_strategy="no"))
    fit(make_trainer(MyTrainer, tmp_path / "b", model=make_adapter(1, lora_dropout=0.3), callbacks=[StopAfter(3)]))
    names = {path.name for path in (tmp_path / "b" / "checkpoint-3").iterdir()}
    assert {"adapter_model.tssd", "adapter_config.json"} <= names and "model.tssd" not in names
    resumed = fit(make_trainer(MyTrainer, tmp_path / "b", model=make_adapter(7, lora_dropout=0.3)), True)
    assert losses(resumed) == losses(straight) and same(weights(resumed), weights(straight))


# Strided shards


@pytest.mark.supports(
    "transformers", "`_StridedShard` (FSDP2 over tensor parallelism, four ranks) is saved as it is, and read whole"
)
def test_strided_shards_are_read_whole(four_ranks: Ranks) -> None:
    """FSDP2 over tensor parallelism, on 4 ranks: the stored tensors equal the whole ones."""
    four_ranks.check("strided")
    folder = four_ranks.folder
    expected = make_model(make_config("mixtral")).state_dict()
    with tssd.Store(str(folder / "store")) as store:
        stored = store.get_state_dict("policy")
        with lazy_state_dict(store, "policy") as state_dict:
            for name, tensor in expected.items():
                assert torch.equal(stored[name].detach(), tensor), name
                assert torch.equal(state_dict[name][1:3], tensor[1:3])
    parts = [tssd.load_file(folder / f"{rank}.tssd") for rank in range(4)]
    for name, tensor in expected.items():
        whole = torch.full_like(tensor, -1)
        for part in parts:
            shard = part[name]
            slices = shard.tensor_slice if isinstance(shard.tensor_slice, list) else [shard.tensor_slice]
            # The boxes of one rank differ in one dimension.
            dim = next((dim for dim in range(tensor.ndim) if len({each.offsets[dim] for each in slices}) > 1), 0)
            for box, piece in zip(slices, shard.local.split([each.local_shape[dim] for each in slices], dim)):
                whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.local_shape))] = piece
        assert torch.equal(whole, tensor), name


def test_dcp_of_torch_2_15_refuses_strided_shards(four_ranks: Ranks) -> None:
    """An observation of torch.distributed.checkpoint, which docs/transformers.md reports."""
    four_ranks.check("strided_dcp")


def test_import_of_tssd_imports_no_engine() -> None:
    engines = ("torch", "transformers", "accelerate", "peft")
    code = f"import sys, tssd, tssd.transformers; print([name for name in {engines} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
