"""`tssd.vllm` in a real engine on CPU: vLLM's tokens are those of transformers after each update."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import tssd
from models import MIXTRAL_CHECKPOINT, PROMPT, greedy, log_probability, make_config, make_model
from tssd.vllm import LLMClient, TrainerInit, TrainerTransfer

HERE = Path(__file__).parent
TOKENS = 8

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# Without it, each worker wants a NUMA node of its own.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# Workers run functions of this file.
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


class Daemon:
    """A daemon of the command that is under test, over a socket and over TCP."""

    def __init__(self, folder: Path) -> None:
        command = [os.environ.get("TSSD_BIN", "tssd"), "serve", "--memory-limit", "1GB", "--listen", "127.0.0.1:0"]
        self.url = f"unix:{folder}/socket"
        self.process = subprocess.Popen(
            [*command, "--socket", str(folder / "socket")], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.tcp_url = self.process.stdout.readline().split()[-1]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=20)


class Engine(LLMClient):
    """An engine of vLLM, which is also the client of a trainer."""

    def __init__(self, folder: Path, kind: str, **options: Any) -> None:
        from vllm import LLM

        self.config = make_config(kind)
        self.config.save_pretrained(folder)
        llm = LLM(
            str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=2,
            weight_transfer_config={"backend": "tssd"},
            **options,
        )
        super().__init__(llm)

    def generate(self) -> tuple[list[int], float]:
        """Returns the tokens after the prompt, and the log-probability of the first one."""
        from vllm import SamplingParams

        options = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=1)
        (result,) = self.llm.generate([{"prompt_token_ids": PROMPT}], options, use_tqdm=False)
        completion = result.outputs[0]
        tokens = list(completion.token_ids)
        return tokens, completion.logprobs[0][tokens[0]].logprob

    def assert_has(self, model: Any, version: int | None) -> None:
        tokens, probability = self.generate()
        assert tokens == greedy(model, TOKENS)
        assert probability == pytest.approx(log_probability(model, tokens), abs=1e-3)
        if version is not None:
            assert self.llm.get_weight_version() == str(version)

    def stop(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path_factory.mktemp("daemon"))
    yield daemon
    daemon.stop()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(tmp_path_factory.mktemp("llama"), "llama", tensor_parallel_size=2, load_format="dummy")
    yield engine
    engine.stop()


def connect(engine: Engine, daemon: Daemon, model: Any, **options: Any) -> TrainerTransfer:
    """Returns a trainer with one rank. The engine reaches the store over TCP."""
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

    options = {"engine_store": daemon.tcp_url, "timeout": 60.0, **options}
    info = TrainerInit(daemon.url, "policy", rank=0, **options)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=engine, source=ModuleSource(model))
    assert isinstance(trainer, TrainerTransfer)
    return trainer


def load_weights(model: Any, seed: int) -> None:
    model.load_state_dict(make_model(model.config, seed).state_dict())


def shard_bytes(model: Any, ranks: int) -> int:
    """Returns the bytes that a tensor-parallel rank needs: norms and biases after the reduction are replicated."""
    replicated = ("norm.weight", "layernorm.weight", "o_proj.bias", "down_proj.bias", ".gate.weight")
    parameters = dict(model.named_parameters()).items()
    return sum(parameter.nbytes // (1 if name.endswith(replicated) else ranks) for name, parameter in parameters)


@pytest.mark.supports(
    "vLLM",
    "each tensor-parallel worker receives exactly the bytes of its shard over TCP; after each of three "
    "updates the tokens are those of transformers (Llama: grouped queries, biases, tied embeddings; TP 2)",
)
def test_each_rank_receives_exactly_its_shard(llama: Engine, daemon: Daemon) -> None:
    model = make_model(llama.config, seed=0)
    trainer = connect(llama, daemon, model)
    for step in (1, 2, 3):
        load_weights(model, seed=step)
        trainer.put()
        reports = trainer.stage()
        assert sorted(reports) == ["worker 0", "worker 1"]
        for report in reports.values():
            assert report["bytes_needed"] == report["bytes_received"] == shard_bytes(model, 2)
            assert report["whole_names"] == 0
        trainer.commit()
        llama.assert_has(model, trainer.version)
    trainer.shutdown()


@pytest.mark.supports(
    "vLLM",
    "the engine serves its old weights while a version is staged, also if the version is deleted meanwhile",
)
def test_engine_serves_its_weights_until_the_commit(llama: Engine, daemon: Daemon) -> None:
    model = make_model(llama.config, seed=4)
    trainer = connect(llama, daemon, model)
    trainer.send_weights()
    old = make_model(llama.config, seed=4)
    llama.assert_has(old, trainer.version)
    before = trainer.version

    load_weights(model, seed=5)
    trainer.put()
    trainer.stage()
    llama.assert_has(old, before)
    # The staged version is leased: neither a newer version nor a deletion disturbs it.
    store = tssd.Store(daemon.url)
    store.delete("policy")
    trainer.commit()
    llama.assert_has(model, trainer.version)
    trainer.shutdown()


@pytest.mark.supports("vLLM", "four FSDP2 ranks put their shards without a collective")
def test_sharded_trainer_gathers_nothing(llama: Engine, daemon: Daemon, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    subprocess.run([*command, str(HERE / "fsdp_ranks.py"), "llama", daemon.url, "70"], check=True, cwd=HERE)
    llama.init_weight_transfer_engine({"store": daemon.url, "key": "policy", "timeout": 60.0})
    llama.start_weight_update()
    llama.update_weights({"version": 70})
    llama.finish_weight_update("70")
    llama.assert_has(make_model(llama.config, seed=70), 70)
    tssd.Store(daemon.url).delete("policy")


def bad_states(model: Any) -> dict[str, tuple[dict[str, torch.Tensor], str]]:
    """Returns state dicts that the engine cannot take, each with the text of the error."""
    state = dict(model.named_parameters())
    name = "model.layers.1.self_attn.k_proj.weight"
    lacking = {other: tensor for other, tensor in state.items() if "layers.1.mlp.down_proj" not in other}
    return {
        "shape": ({**state, name: torch.zeros(7, 128)}, name),
        "missing": (lacking, "the version has nothing for the parameters `model.layers.1.mlp.down_proj.weight`"),
        "unknown": ({**state, "model.layers.1.mlp.router.weight": torch.zeros(3)}, "model.layers.1.mlp.router.weight"),
        "dtype": ({**state, name: torch.zeros(64, 128, dtype=torch.int32)}, name),
    }


@pytest.mark.supports("vLLM", "wrong names, shapes and dtypes are named, and the engine keeps its weights")
def test_bad_versions_leave_the_engine_as_it_is(llama: Engine, daemon: Daemon) -> None:
    model = make_model(llama.config, seed=6)
    trainer = connect(llama, daemon, model)
    trainer.send_weights()
    store = tssd.Store(daemon.url)
    for kind, (state, text) in bad_states(model).items():
        report = store.put_state_dict(state, "policy")
        with pytest.raises(Exception) as raised:
            llama.start_weight_update()
            llama.update_weights({"version": report.version})
        assert text in error_text(raised.value), kind
        llama.assert_has(model, trainer.version)
    store.delete("policy")
    trainer.shutdown()


def error_text(error: BaseException) -> str:
    """Returns the text of an error and of its causes: the engine passes on what a worker raised."""
    texts = []
    current: BaseException | None = error
    while current is not None:
        texts.append(str(current))
        current = current.__cause__ or current.__context__
    return json.dumps(texts)


def test_update_resets_the_prefix_cache(llama: Engine, daemon: Daemon) -> None:
    """Tokens after a prompt that the engine knows are those of the new weights."""
    from vllm import SamplingParams

    # A block of the cache has 128 tokens.
    llama_prompt = [1 + number % 300 for number in range(100)] * 2
    options = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=1)
    model = make_model(llama.config, seed=20)
    trainer = connect(llama, daemon, model)
    for seed in (20, 21, 22):
        load_weights(model, seed)
        trainer.send_weights()
        for _ in range(2):
            (result,) = llama.llm.generate([{"prompt_token_ids": llama_prompt}], options, use_tqdm=False)
            token = result.outputs[0].token_ids[0]
            with torch.no_grad():
                expected = model(torch.tensor([llama_prompt])).logits[0, -1].log_softmax(-1)
            assert token == int(expected.argmax())
            found = result.outputs[0].logprobs[0][token].logprob
            assert found == pytest.approx(float(expected[token]), abs=1e-3)
    tssd.Store(daemon.url).delete("policy")
    trainer.shutdown()


def force_whole(worker: Any) -> None:
    """Has a worker load whole tensors, as if its loaders computed with them."""
    from tssd.vllm import _installer
    from tssd.vllm._recording import Recording

    _installer.record = lambda model, device, specs: Recording(whole_names=list(specs))
    worker.weight_transfer_engine._installer._specs = {}


def set_torchao_reload(worker: Any) -> None:
    worker.model_runner.model._do_torchao_reload = True


def take_torchao_reload(worker: Any) -> bool:
    """Returns whether the model reloads quantised weights of torchao itself, and clears the flag."""
    model = worker.model_runner.model
    value, model._do_torchao_reload = model._do_torchao_reload, False
    return bool(value)


def record_again(worker: Any) -> None:
    from tssd.vllm import _installer, _recording

    _installer.record = _recording.record
    worker.weight_transfer_engine._installer._specs = {}


@pytest.mark.supports("vLLM", "where the loading cannot be recorded, whole tensors are fetched and loaded")
def test_whole_tensors_are_loaded_by_the_model(llama: Engine, daemon: Daemon) -> None:
    model = make_model(llama.config, seed=30)
    trainer = connect(llama, daemon, model, timeout=20.0)
    trainer.send_weights()
    llama.llm.collective_rpc(force_whole)
    try:
        for seed in (31, 32):
            load_weights(model, seed)
            trainer.put()
            reports = trainer.stage()
            size = sum(parameter.nbytes for parameter in model.parameters())
            for report in reports.values():
                assert report["whole_names"] == len(list(model.parameters()))
                assert report["bytes_received"] == report["bytes_needed"] == size
            trainer.commit()
            llama.assert_has(model, trainer.version)
        # It is found during the commit, and the next update is complete.
        name = "model.layers.1.self_attn.k_proj.weight"
        store = tssd.Store(daemon.url)
        state = {**dict(model.named_parameters()), name: torch.zeros(7, 128)}
        report = store.put_state_dict(state, "policy")
        llama.llm.collective_rpc(set_torchao_reload)
        with pytest.raises(Exception) as raised:
            llama.start_weight_update()
            llama.update_weights({"version": report.version})
        assert llama.llm.collective_rpc(take_torchao_reload) == [True, True]
        assert f"the model cannot load `{name}`" in error_text(raised.value)
        store.delete("policy")
        trainer = connect(llama, daemon, model, timeout=20.0)
        load_weights(model, 33)
        trainer.send_weights()
        llama.assert_has(model, trainer.version)
    finally:
        llama.llm.collective_rpc(record_again)
    tssd.Store(daemon.url).delete("policy")
    trainer.shutdown()


@pytest.mark.supports("vLLM", "a version that never comes ends in a timeout")
def test_version_that_never_comes_times_out(llama: Engine, daemon: Daemon) -> None:
    model = make_model(llama.config, seed=7)
    trainer = connect(llama, daemon, model, timeout=2.0)
    trainer.send_weights()
    with pytest.raises(Exception) as raised:
        llama.start_weight_update()
        llama.update_weights({"version": 10_000})
    assert "10000" in error_text(raised.value)
    llama.assert_has(model, trainer.version)
    tssd.Store(daemon.url).delete("policy")
    trainer.shutdown()


@pytest.mark.supports("vLLM", "weights with NaN are not put (`check_finite`)")
def test_weights_that_are_not_finite_are_not_put(llama: Engine, daemon: Daemon) -> None:
    model = make_model(llama.config, seed=10)
    trainer = connect(llama, daemon, model, check_finite=True)
    trainer.send_weights()
    before = trainer.version
    name = "model.layers.1.mlp.down_proj.weight"
    with torch.no_grad():
        model.get_parameter(name)[3, 4] = float("nan")
    with pytest.raises(ValueError, match=rf"the first is in `{name}` at \[3, 4\]"):
        trainer.send_weights()
    llama.assert_has(make_model(llama.config, seed=10), before)
    load_weights(model, seed=11)
    trainer.send_weights()
    llama.assert_has(model, trainer.version)
    assert trainer.version > before
    trainer.shutdown()
    tssd.Store(daemon.url).delete("policy")


@pytest.mark.supports(
    "vLLM", "after a put that failed on one of two ranks, the next version has the weights of one step"
)
def test_failed_put_of_one_rank_mixes_no_steps(daemon: Daemon) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*command, str(HERE / "failing_ranks.py"), daemon.url], check=True, cwd=HERE)
    tssd.Store(daemon.url).delete("failing")


OTHER_TRAINER = """
import sys, torch, tssd
store = tssd.Store(sys.argv[1])
print(store.put_state_dict({"w": torch.ones(3)}, "policy").version, flush=True)
sys.stdin.read()
"""


@pytest.mark.supports("vLLM", "a second trainer under the same key is found, and named")
def test_second_trainer_under_the_key_is_found(llama: Engine, daemon: Daemon) -> None:
    model = make_model(llama.config, seed=12)
    trainer = connect(llama, daemon, model)
    trainer.send_weights()
    command = [sys.executable, "-c", OTHER_TRAINER, daemon.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdin is not None
        assert int(other.stdout.readline()) == trainer.version + 1
        with pytest.raises(tssd.TssdError, match="key `policy`: another trainer has put a version"):
            trainer.send_weights()
        llama.assert_has(model, trainer.version)
        other.stdin.close()
    tssd.Store(daemon.url).delete("policy")
    trainer.shutdown()


@pytest.mark.supports("vLLM", "a version of which a rank has not put its part leaves the engine with its weights")
def test_incomplete_version_leaves_the_engine_as_it_is(llama: Engine, daemon: Daemon) -> None:
    model = make_model(llama.config, seed=13)
    trainer = connect(llama, daemon, model, timeout=3.0)
    trainer.send_weights()
    store = tssd.Store(daemon.url)
    # Rank 0 of two has put its part.
    own = {"part": torch.ones(3)}
    report = store.put_state_dict(own, "policy", version=trainer.version + 1, writers=2, writer=0, job="run")
    assert not report.visible
    with pytest.raises(Exception) as raised:
        llama.start_weight_update()
        llama.update_weights({"version": report.version})
    assert f"no version from {report.version} on" in error_text(raised.value)
    llama.assert_has(model, trainer.version)
    store.delete("policy")
    trainer.shutdown()


@pytest.mark.supports("vLLM", "a daemon that dies leaves the engine with its weights")
def test_daemon_that_dies_leaves_the_engine_as_it_is(llama: Engine, tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    model = make_model(llama.config, seed=8)
    trainer = connect(llama, daemon, model, timeout=5.0)
    trainer.send_weights()
    load_weights(model, seed=9)
    trainer.put()
    daemon.process.send_signal(signal.SIGKILL)
    daemon.process.wait()
    with pytest.raises(Exception) as raised:
        trainer.stage()
    assert "no daemon at" in error_text(raised.value) or "daemon is gone" in error_text(raised.value)
    llama.assert_has(make_model(llama.config, seed=8), None)


@pytest.mark.supports(
    "vLLM",
    'an engine starts from the store (`load_format="tssd"`), and its experts are updated (Mixtral)',
)
def test_engine_starts_from_the_store_and_updates_experts(
    daemon: Daemon, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = make_config("mixtral")
    model = make_model(config, seed=1)
    store = tssd.Store(daemon.url)
    store.put_state_dict(dict(model.named_parameters()), "policy", mapping=MIXTRAL_CHECKPOINT)
    engine = Engine(
        tmp_path_factory.mktemp("mixtral"),
        "mixtral",
        load_format="tssd",
        model_loader_extra_config={"store": daemon.url, "key": "policy"},
    )
    try:
        engine.assert_has(model, None)
        trainer = connect(engine, daemon, model, mapping=MIXTRAL_CHECKPOINT, engine_store=None)
        for step in (2, 3):
            load_weights(model, seed=step)
            trainer.send_weights()
            engine.assert_has(model, trainer.version)
        # vLLM's own reload takes the weights from the same version.
        trainer.shutdown()
    finally:
        engine.stop()
        store.delete("policy")
