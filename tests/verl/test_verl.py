"""`tssd.verl` in verl's real workers and manager on CPUs: each rollout rank receives what the actor ranks have."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

# Before the first import of verl. The processes of Ray inherit them.
os.environ["VERL_PLATFORM"] = "cpu"
os.environ["VERL_USE_EXTERNAL_MODULES"] = "cpu_platform"
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import ray
import torch
import tssd
import tssd.verl
import workers
from tssd.verl import StoreCheckpointEngine
from verl.workers.config import CheckpointEngineConfig
from verl.workers.engine.spec import ShardSpec

State = dict[str, torch.Tensor]
BUCKET = 1 << 20


class Daemon:
    """A daemon of the command that is under test, over a socket and over TCP."""

    def __init__(self, folder: Path) -> None:
        self.url = f"unix:{folder}/socket"
        self._command = [os.environ.get("TSSD_BIN", "tssd"), "serve", "--memory-limit", "1GB"]
        self._command += ["--listen", "127.0.0.1:0", "--socket", str(folder / "socket")]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.tcp_url = self.process.stdout.readline().split()[-1]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=20)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=20)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path_factory.mktemp("daemon"))
    yield daemon
    daemon.stop()


@pytest.fixture
def own_daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that the test may kill."""
    daemon = Daemon(tmp_path)
    yield daemon
    daemon.stop()


@pytest.fixture(autouse=True)
def records() -> Iterator[list[tssd.SyncRecord]]:
    """The records of the engines in this process."""
    records: list[tssd.SyncRecord] = []
    remove = tssd.on_sync(records.append)
    yield records
    remove()


# Engines in this process, driven as the manager drives those of workers.


class Engines:
    """The checkpoint engines of actor and rollout ranks."""

    def __init__(self, url: str, actors: int, rollouts: int, rollout_url: str | None = None, **options: Any) -> None:
        options = {"bucket_size": BUCKET, "timeout": 20.0, **options}
        self.actors = [StoreCheckpointEngine(is_master=rank == 0, store=url, **options) for rank in range(actors)]
        self.rollouts = [StoreCheckpointEngine(store=rollout_url or url, **options) for _ in range(rollouts)]

    def begin(self) -> None:
        ranks = [*self.actors, *self.rollouts]
        metadata = [rank.prepare() for rank in ranks]
        arguments = StoreCheckpointEngine.build_topology(len(self.actors), len(self.rollouts), metadata)
        for engines, names in zip((self.actors, self.rollouts), arguments):
            for index, engine in enumerate(engines):
                engine.init_process_group(**{name: values[index] for name, values in names.items()})

    async def send(self, state: State, step: int | None = None) -> list[Any]:
        return await asyncio.gather(*(actor.send_weights(iter(state.items()), step) for actor in self.actors))

    async def round(self, state: State, step: int | None = None) -> list[State]:
        """Runs one round. Returns what the rollout ranks have received."""
        self.begin()
        received = [asyncio.create_task(receive(rollout, step)) for rollout in self.rollouts]
        await self.send(state, step)
        states = await asyncio.gather(*received)
        for engine in (*self.actors, *self.rollouts):
            engine.finalize()
        return states


async def receive(engine: StoreCheckpointEngine, step: int | None = None) -> State:
    return {name: tensor async for name, tensor in engine.receive_weights(step)}


def make_state(seed: int = 0) -> State:
    """Returns tensors of many dtypes and shapes."""
    generator = torch.Generator().manual_seed(seed)
    tied = torch.rand(64, 96, generator=generator)
    return {
        "embed_tokens.weight": tied,
        "layers.0.bf16": torch.rand(300, 200, generator=generator).bfloat16(),
        "layers.0.int8": torch.randint(-128, 128, (4096, 33), generator=generator, dtype=torch.int8),
        "layers.0.fp8": torch.rand(128, 128, generator=generator).to(torch.float8_e4m3fn),
        "layers.0.scale": torch.tensor(0.5 + seed),
        "layers.0.nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "layers.1.empty": torch.empty(0, 16, dtype=torch.bfloat16),
        "layers.1.no_columns": torch.empty(3, 0),
        "layers.1.nothing": torch.empty(0),
        "layers.1.bool": torch.rand(7, generator=generator) > 0.5,
        "layers.1.expanded": torch.rand(3, 1, generator=generator).expand(3, 5),
        "layers.1.view": torch.rand(96, 64, generator=generator).t(),
        "layers.1": torch.rand(5, generator=generator),
        "layers.1.big": torch.rand(3 * BUCKET // 4 + 1, generator=generator),
        "[a]*": torch.rand(4, generator=generator),
        "norm.weight": torch.nn.Parameter(torch.rand(1, generator=generator)),
        "lm_head.weight": tied,
    }


def assert_equal(received: State, sent: State) -> None:
    assert list(received) == list(sent)
    for name, tensor in sent.items():
        assert type(received[name]) is torch.Tensor and not received[name].requires_grad
        assert (received[name].dtype, received[name].shape) == (tensor.dtype, tensor.shape), name
        ours, theirs = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (received[name], tensor))
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(("actors", "rollouts"), [(1, 1), (2, 2), (3, 1), (4, 3), (2, 0)])
@pytest.mark.supports("verl", "any number of actor and rollout ranks: 1 to 4 and 0 to 3")
def test_any_number_of_ranks_transfers_all_tensors(daemon: Daemon, actors: int, rollouts: int) -> None:
    engines = Engines(daemon.url, actors, rollouts, key="policy")
    for step in range(3):
        state = make_state(step)
        states = asyncio.run(engines.round(state, step))
        assert len(states) == rollouts
        for received in states:
            assert_equal(received, state)
        head = tssd.Store(daemon.url).head("policy")
        assert head is not None and head.metadata == {"global_steps": step}
        assert head.writers == list(range(actors))


def test_actor_ranks_divide_the_bytes(daemon: Daemon, records: list[tssd.SyncRecord]) -> None:
    state = {f"layers.{index}": torch.rand(50_000 + 97 * index) for index in range(64)}
    total = sum(tensor.nbytes for tensor in state.values())
    asyncio.run(Engines(daemon.url, 4, 2, key="divided").round(state))
    puts = [record for record in records if record.role == "verl actor"]
    gets = [record for record in records if record.role == "verl rollout"]
    assert len(puts) == 4 and len(gets) == 2
    sizes = [record.bytes_needed or 0 for record in puts]
    assert total <= sum(sizes) < total * 1.02
    assert max(sizes) < total / 4 * 1.05
    for record in gets:
        assert (record.bytes_needed, record.bytes_received) == (total, 0)
        assert record.stage_seconds and record.commit_seconds is not None
    assert {record.version for record in records} == {puts[0].version}


def test_many_small_tensors_keep_their_order(daemon: Daemon) -> None:
    state = {f"layers.{index % 97}.{index}": torch.full((2,), float(index)) for index in range(5000)}
    (received,) = asyncio.run(Engines(daemon.url, 2, 1, key="small", bucket_size=4096).round(state))
    assert_equal(received, state)


def test_tensors_are_views_of_shared_memory_and_stay_valid(daemon: Daemon) -> None:
    engines = Engines(daemon.url, 2, 2, key="views")
    first = {f"layers.{index}": torch.rand(BUCKET // 8 << index) for index in range(5)}
    kept = asyncio.run(engines.round(first))
    assert all(is_shared(tensor) for states in kept for tensor in states.values())
    for seed in range(5):
        asyncio.run(engines.round({name: torch.full_like(tensor, seed) for name, tensor in first.items()}))
    for states in kept:
        assert_equal(states, first)


def is_shared(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is in memory that is shared with the daemon."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(bound, 16) for bound in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return "memfd:" in line
    return False


@pytest.mark.supports("verl", "rollout ranks of other hosts")
def test_rollout_ranks_of_other_hosts_receive_over_tcp(daemon: Daemon, records: list[tssd.SyncRecord]) -> None:
    state = make_state(3)
    states = asyncio.run(Engines(daemon.url, 2, 2, rollout_url=daemon.tcp_url, key="tcp").round(state))
    for received in states:
        assert_equal(received, state)
    gets = [record for record in records if record.role == "verl rollout"]
    assert all((record.bytes_received or 0) >= (record.bytes_needed or 0) > 0 for record in gets)


def test_versions_are_kept_and_retried_steps_are_new_ones(daemon: Daemon) -> None:
    engines = Engines(daemon.url, 2, 1, key="kept", keep=3)
    for seed, step in enumerate([1, 2, 2, 3, 3]):
        (received,) = asyncio.run(engines.round(make_state(seed), step))
        assert_equal(received, make_state(seed))
    store = tssd.Store(daemon.url)
    steps = []
    for info in store.versions("kept"):
        with store.open("kept", version=info) as version:
            steps.append((version.metadata() or {})["global_steps"])
    assert steps == [2, 3, 3]


def test_floating_tensors_are_cast(daemon: Daemon) -> None:
    state = {"a": torch.rand(100, 10), "gate": torch.rand(9), "count": torch.arange(5), "empty": torch.empty(0, 2)}
    engines = Engines(daemon.url, 2, 1, key="cast", transfer_dtype="bfloat16", keep_dtype=["gate"])
    (received,) = asyncio.run(engines.round(state))
    assert_equal(received, {**state, "a": state["a"].bfloat16(), "empty": state["empty"].bfloat16()})


def test_device_has_tensors_of_its_own(daemon: Daemon) -> None:
    engines = Engines(daemon.url, 2, 1, key="device", device="cpu")
    (received,) = asyncio.run(engines.round(make_state()))
    assert_equal(received, make_state())
    assert not any(is_shared(tensor) for tensor in received.values())


def test_batches_have_at_most_the_bytes_of_a_bucket() -> None:
    metas = {f"layers.{index}": torch.empty(index % 7, device="meta") for index in range(100)}
    metas["large"] = torch.empty(1000, device="meta")
    metas["last"] = torch.empty(1, device="meta")
    batches = tssd.verl._cut(metas, 100)
    assert [name for batch in batches for name in batch] == list(metas)
    sizes = [sum(meta.nbytes for meta in batch.values()) for batch in batches]
    assert max(sizes[:-2]) <= 100 and sizes[-2:] == [4000, 4]
    assert all(first + second > 100 for first, second in zip(sizes, sizes[1:]))
    assert tssd.verl._cut({}, 100) == []


class ShardEngine:
    """A training engine whose shards are whole tensors, or are described by `specs`."""

    def __init__(self, state: State, **specs: ShardSpec) -> None:
        self._state, self._specs = state, specs

    def get_per_tensor_param_shard(self) -> tuple[Iterator[tuple[str, torch.Tensor, ShardSpec]], None]:
        shards = (
            (name, tensor.reshape(-1), self._specs.get(name) or ShardSpec.from_param(tensor))
            for name, tensor in self._state.items()
        )
        return shards, None


def test_unsharded_tensors_of_an_engine_are_put_once(daemon: Daemon, records: list[tssd.SyncRecord]) -> None:
    state = {"a": torch.rand(100, 100), "b": torch.rand(3), "c": torch.tensor(1.0)}
    engines = Engines(daemon.url, 2, 1, key="unsharded")
    engines.begin()

    async def run() -> None:
        task = asyncio.create_task(receive(engines.rollouts[0]))
        await asyncio.gather(*(actor.send_weights(ShardEngine(state)) for actor in engines.actors))
        assert_equal(await task, state)

    asyncio.run(run())
    first, second = (record.bytes_needed or 0 for record in records if record.role == "verl actor")
    assert first > 40_000 and second < 10_000


def test_shards_that_are_not_of_checkpoint_tensors_are_refused(daemon: Daemon) -> None:
    state = {"a": torch.rand(4), "experts": torch.rand(2, 3)}
    spec = ShardSpec((2, 3), hf_slots=[("experts.0", (3,)), ("experts.1", (3,))])
    engines = Engines(daemon.url, 1, 0, key="converted")
    engines.begin()
    with pytest.raises(tssd.TssdUnsupportedError, match="`experts`.*get_per_tensor_param"):
        asyncio.run(engines.actors[0].send_weights(ShardEngine(state, experts=spec)))
    assert not tssd.Store(daemon.url).exists("converted")


# Faults.


def test_rank_that_raises_fails_its_round_only(daemon: Daemon) -> None:
    engines = Engines(daemon.url, 3, 2, key="raises", timeout=2.0)
    state = make_state(1)

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(state.items())[:5]
        raise OSError("the rank fails")

    async def failed_round() -> list[Any]:
        engines.begin()
        generators = [iter(state.items()), failing(), iter(state.items())]
        sent = [actor.send_weights(generator) for actor, generator in zip(engines.actors, generators)]
        return await asyncio.gather(
            *sent, *(receive(rollout, 9) for rollout in engines.rollouts), return_exceptions=True
        )

    for _ in range(3):
        started = time.monotonic()
        *sent, first, second = asyncio.run(failed_round())
        assert time.monotonic() - started < 10
        assert isinstance(sent[1], OSError)
        for error in (first, second):
            assert isinstance(error, tssd.TssdTimeoutError)
            assert "weights of step 9" in str(error) and "`raises`" in str(error) and "actor ranks" in str(error)
    for received in asyncio.run(engines.round(state)):
        assert_equal(received, state)


def test_failed_put_drains_the_weights(own_daemon: Daemon) -> None:
    # Of a collective, each rank must take all tensors, or the other ranks wait for it.
    engines = Engines(own_daemon.url, 1, 1, timeout=3.0, bucket_size=100)
    state = {f"layers.{index}": torch.rand(100) for index in range(10)}
    taken = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(state.items()):
            if index == 3:
                own_daemon.kill()
            taken.append(pair[0])
            yield pair

    engines.begin()
    with pytest.raises(tssd.TssdConnectionError):
        asyncio.run(engines.actors[0].send_weights(weights()))
    assert taken == list(state)


@pytest.mark.supports("verl", "a daemon that dies is reported, and can be started again")
def test_daemon_that_dies_is_reported_and_may_be_started_again(own_daemon: Daemon) -> None:
    engines = Engines(own_daemon.url, 2, 2, timeout=3.0)
    state = make_state(2)
    asyncio.run(engines.round(state))
    engines.begin()
    own_daemon.kill()
    with pytest.raises(tssd.TssdConnectionError, match="daemon"):
        asyncio.run(engines.send(state))
    with pytest.raises(tssd.TssdConnectionError, match="daemon"):
        asyncio.run(receive(engines.rollouts[0]))
    with pytest.raises(tssd.TssdConnectionError, match="daemon"):
        engines.begin()
    own_daemon.start()
    for received in asyncio.run(engines.round(state)):
        assert_equal(received, state)


def test_rollout_rank_waits_for_the_version_of_its_round(daemon: Daemon) -> None:
    engines = Engines(daemon.url, 2, 1, key="waits")
    asyncio.run(engines.round(make_state(1), 1))

    async def run() -> None:
        engines.begin()
        task = asyncio.create_task(receive(engines.rollouts[0], 2))
        await asyncio.sleep(0.3)
        assert not task.done()
        await engines.send(make_state(2), 2)
        assert_equal(await task, make_state(2))

    asyncio.run(run())


def test_newer_round_ends_a_wait_of_an_older_one(daemon: Daemon) -> None:
    engines = Engines(daemon.url, 1, 1, key="newer")
    state = make_state(4)

    async def run() -> None:
        engines.begin()
        stale = asyncio.create_task(receive(engines.rollouts[0], 1))
        await asyncio.sleep(0.2)
        started = time.monotonic()
        (received,) = await engines.round(state, 1)
        assert_equal(received, state)
        with pytest.raises(tssd.TssdValueError, match="a newer round has begun"):
            await stale
        assert time.monotonic() - started < 10

    asyncio.run(run())


def test_cancelled_receive_is_cancelled(daemon: Daemon) -> None:
    engines = Engines(daemon.url, 1, 1, key="cancelled")

    async def run() -> None:
        engines.begin()
        task = asyncio.create_task(receive(engines.rollouts[0]))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


@pytest.mark.supports("verl", "a killed rollout worker takes part in the next round once it is restarted")
def test_restarted_rollout_worker_takes_part_in_the_next_round(daemon: Daemon, tmp_path: Path) -> None:
    engines = Engines(daemon.url, 1, 1, key="restarted", keep=1)
    state = make_state(5)
    asyncio.run(engines.round(state))
    # A worker that is killed while it has the version open.
    script = tmp_path / "worker.py"
    script.write_text(
        "import asyncio, os, sys, tssd\n"
        "from tssd.verl import StoreCheckpointEngine\n"
        "async def run():\n"
        "    engine = StoreCheckpointEngine(1 << 20, store=sys.argv[1], key='restarted')\n"
        "    engine.init_process_group(0, 1, tssd.Store(sys.argv[1]).head('restarted').run)\n"
        "    async for _ in engine.receive_weights():\n"
        "        os.kill(os.getpid(), 9)\n"
        "asyncio.run(run())\n"
    )
    paths = os.pathsep.join([str(workers.HERE), str(Path(tssd.__file__).parent.parent)])
    killed = subprocess.run([sys.executable, str(script), daemon.url], env={**os.environ, "PYTHONPATH": paths})
    assert killed.returncode == -signal.SIGKILL
    engines.rollouts = Engines(daemon.url, 0, 1, key="restarted").rollouts
    for seed in (6, 7):
        (received,) = asyncio.run(engines.round(make_state(seed)))
        assert_equal(received, make_state(seed))


def test_version_is_leased_while_its_tensors_are_yielded(daemon: Daemon) -> None:
    engines = Engines(daemon.url, 2, 1, key="leased", keep=1)
    state = {f"layers.{index}": torch.rand(1 << 18) for index in range(8)}

    async def run() -> State:
        engines.begin()
        await engines.send(state)
        received: State = {}
        async for name, tensor in engines.rollouts[0].receive_weights():
            if not received:
                store = tssd.Store(daemon.url)
                for _ in range(3):
                    store.put_state_dict({"layers.0": torch.zeros(1 << 18)}, "leased")
                store.delete("leased")
            received[name] = tensor
        return received

    assert_equal(asyncio.run(run()), state)


def test_failed_consumer_releases_the_version(daemon: Daemon) -> None:
    engines = Engines(daemon.url, 1, 1, key="consumer")
    state = {f"layers.{index}": torch.rand(1 << 18) for index in range(8)}

    async def consume(weights: AsyncIterator[tuple[str, torch.Tensor]]) -> None:
        async for _ in weights:
            raise OSError("the server fails")

    async def run() -> None:
        engines.begin()
        await engines.send(state)
        with pytest.raises(OSError, match="the server fails"):
            await consume(engines.rollouts[0].receive_weights())
        # asyncio closes the generator.
        gc.collect()
        deadline = time.monotonic() + 10
        while (leases := list_leases(daemon)) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        assert not leases

    asyncio.run(run())
    (received,) = asyncio.run(engines.round(state))
    assert_equal(received, state)
    # The tensors are views: they hold a lease as long as they are alive.
    assert list_leases(daemon)


def list_leases(daemon: Daemon) -> list[Any]:
    command = os.environ.get("TSSD_BIN", "tssd")
    status = subprocess.run([command, "status", "--store", daemon.url, "--json"], capture_output=True, text=True)
    assert status.returncode == 0, status.stderr
    leases: list[Any] = json.loads(status.stdout)["leases"]
    return [lease for lease in leases if "consumer" in json.dumps(lease)]


def test_damaged_bytes_are_not_yielded(tmp_path: Path) -> None:
    engines = Engines(str(tmp_path), 2, 1, durability="disk")
    state = {f"layers.{index}": torch.rand(1 << 16) for index in range(4)}
    engines.begin()
    asyncio.run(engines.send(state))
    for path in tmp_path.rglob("*.tssd"):
        if path.name != "manifest.tssd":
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.chmod(0o600)
            path.write_bytes(content)
    with pytest.raises(tssd.TssdCorruptError):
        asyncio.run(receive(engines.rollouts[0]))


def test_calls_without_a_round_are_refused(daemon: Daemon) -> None:
    engines = Engines(daemon.url, 1, 1)
    calls: list[Callable[[], Any]] = [lambda: receive(engines.rollouts[0]), lambda: engines.send({})]
    for call in calls:
        with pytest.raises(RuntimeError, match="prepare"):
            asyncio.run(call())


# verl's own workers and manager.


@pytest.fixture(scope="module")
def cluster(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[workers.Cluster]:
    config = CheckpointEngineConfig(
        backend="tssd",
        update_weights_bucket_megabytes=1,
        custom_backend_module="tssd.verl",
        engine_kwargs={"tssd": {"store": daemon.url, "key": "policy", "timeout": 30.0}},
    )
    workers.start_ray(str(Path(tssd.__file__).parent.parent))
    yield workers.Cluster(tmp_path_factory.mktemp("model"), config, actors=2, rollouts=2)
    ray.shutdown()


@pytest.mark.supports(
    "verl",
    "verl's manager, training worker (FSDP2) and checkpoint-engine workers, 2 and 2: every tensor of each "
    "round is equal",
)
def test_workers_receive_changed_weights_in_each_round(cluster: workers.Cluster, daemon: Daemon) -> None:
    cluster.manager.update_weights(global_steps=0)
    # verl's own comparison, with the checkpoint from which the actors started.
    cluster.rollouts.check_weights()
    for step in (1, 2, 3):
        names = cluster.actors.fill(step)[0]
        metrics = cluster.manager.update_weights(global_steps=step)
        assert cluster.rollouts.check_seed(names, step) == [len(names)] * 2
        head = tssd.Store(daemon.url).head("policy")
        assert head is not None and head.metadata == {"global_steps": step}
        assert metrics["tssd/version"] == head.version and metrics["tssd/verl actor/put_seconds"] > 0
        assert metrics["collectives"] == len(names)


@pytest.mark.supports("verl", "shards of the training engine are put without a collective (`delta_sharded`)")
def test_shards_of_the_training_engine_are_put_without_a_gather(cluster: workers.Cluster) -> None:
    names = [(name, shape, torch.bfloat16) for name, shape, _ in cluster.actors.fill(10)[0]]
    cluster.manager.backend = "delta_sharded"
    try:
        metrics = cluster.manager.update_weights(global_steps=10)
    finally:
        cluster.manager.backend = "tssd"
    assert cluster.rollouts.check_seed(names, 10) == [len(names)] * 2
    assert metrics["collectives"] == 0


@pytest.mark.supports("verl", "a rank that raises fails its round only")
def test_workers_go_on_after_a_failed_round(cluster: workers.Cluster) -> None:
    names = cluster.actors.fill(20)[0]
    cluster.actors.fail_at(rank=1, count=4)
    with pytest.raises(Exception, match="the rank fails"):
        cluster.manager.update_weights(global_steps=20)
    cluster.actors.fail_at(rank=1, count=None)
    started = time.monotonic()
    cluster.manager.update_weights(global_steps=20)
    assert cluster.rollouts.check_seed(names, 20) == [len(names)] * 2
    # The workers did not wait for their timeout.
    assert time.monotonic() - started < 20


@pytest.mark.supports("verl", "rollout replicas join and leave")
def test_replicas_join_and_leave(cluster: workers.Cluster) -> None:
    replicas = list(cluster.manager.replicas)
    names = cluster.actors.fill(30)[0]
    cluster.manager.remove_replicas(replicas[1:])
    cluster.manager.update_weights(global_steps=30)
    cluster.manager.add_replicas(replicas[1:])
    cluster.manager.update_weights(global_steps=31)
    assert cluster.rollouts.check_seed(names, 30) == [len(names)] * 2
