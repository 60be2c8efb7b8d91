"""Puts and gets of arrays in GPU memory.

Run `pytest python/tests/gpu_cases.py` on a machine with a GPU. `test_gpu.py` runs it on the fake CUDA driver.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gpu
import numpy as np
import pytest
import tssd
from processes import Daemon

try:
    import torch

    HAS_CUDA = torch.cuda.is_available()
except ImportError:
    HAS_CUDA = False

MATRIX = np.arange(512 * 1024, dtype=np.float32).reshape(512, 1024)
SLICE = {"coordinates": (), "global_shape": (512, 1024), "mesh_shape": ()}


@pytest.fixture(scope="module")
def driver() -> gpu.Driver:
    try:
        return gpu.Driver()
    except (OSError, AssertionError) as error:
        pytest.skip(f"no driver: {error}")


@pytest.fixture(params=["memory", "directory", "daemon"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tssd.Store]:
    if request.param == "memory":
        yield tssd.Store("memory:")
    elif request.param == "directory":
        yield tssd.Store(str(tmp_path / "store"))
    else:
        with Daemon(tmp_path / "socket") as url, tssd.Store(url) as store:
            yield store


@pytest.fixture(autouse=True)
def all_exports_are_released() -> Iterator[None]:
    yield
    gc.collect()
    assert not gpu.exported


def element_bytes(value: Any) -> bytes:
    """Returns the bytes of the elements of a result of any framework, in row-major order."""
    if not isinstance(value, np.ndarray):
        value = value.contiguous().view(torch.uint8).numpy()
    return bytes(np.ascontiguousarray(value).tobytes())


def test_arrays_roundtrip(driver: gpu.Driver, store: tssd.Store) -> None:
    weight, half = gpu.Array(driver, MATRIX), gpu.Array(driver, (MATRIX % 2048).astype(np.float16))
    brain = gpu.Array(driver, np.arange(600, dtype=np.uint16).reshape(20, 30), "bfloat16")
    transposed = gpu.Array(driver, MATRIX, strides=(1, 512))
    scalar, empty = gpu.Array(driver, np.int64(7)), gpu.Array(driver, np.zeros((0, 3), np.int8))
    host, old = gpu.Array(None, MATRIX[:3]), gpu.Array(driver, MATRIX[:5], version=None)
    state = {"model": {"weight": weight, "tied": weight, "half": half, "brain": brain, "turned": transposed}}
    state |= {"scalar": scalar, "empty": empty, "host": host, "old": old, "name": "policy"}
    for step in range(3):
        # The stream still writes when the put begins, and writes again as soon as the put has returned.
        weight.write(MATRIX + step)
        report = store.put_state_dict(state, "policy")
        weight.write(MATRIX - 1)
        copies = report.device_copies
        assert copies is not None
        assert copies.pinned + copies.pageable >= weight.size + half.size + transposed.size
        assert (report.transport == "shared_memory") == (copies.pinned > 0)
        loaded = store.get_state_dict("policy")
        model = loaded["model"]
        assert element_bytes(model["weight"]) == (MATRIX + step).tobytes() == element_bytes(model["tied"])
        assert element_bytes(model["half"]) == half.read() and element_bytes(model["brain"]) == brain.read()
        assert model["turned"].shape == (512, 1024)
        assert element_bytes(model["turned"]) == MATRIX.reshape(1024, 512).T.tobytes()
        assert element_bytes(loaded["host"]) == host.read() and element_bytes(loaded["old"]) == old.read()
        assert int(loaded["scalar"]) == 7 and loaded["empty"].shape == (0, 3) and loaded["name"] == "policy"
        driver.wait()


def test_arrays_may_be_modified_after_put_without_wait(driver: gpu.Driver, store: tssd.Store) -> None:
    weight = gpu.Array(driver, MATRIX)
    pending = store.put_state_dict({"weight": weight}, "policy", wait=False)
    weight.write(MATRIX + 1)
    report = pending.result()
    assert report.device_copies is not None
    assert element_bytes(store.get_state_dict("policy")["weight"]) == MATRIX.tobytes()
    driver.wait()


def test_arrays_are_published_one_by_one(driver: gpu.Driver, store: tssd.Store) -> None:
    weight = gpu.Array(driver, MATRIX)
    with store.publish("policy", bucket_bytes=1 << 20) as publisher:
        for number in range(4):
            weight.write(MATRIX + number)
            publisher.put(f"layers.{number}", weight)
            publisher.flush()
    copies = publisher.report.device_copies
    assert copies is not None and copies.pinned + copies.pageable == 4 * weight.size
    loaded = store.get_state_dict("policy")
    for number in range(4):
        assert element_bytes(loaded[f"layers.{number}"]) == (MATRIX + number).tobytes()


def test_arrays_are_filled(driver: gpu.Driver, store: tssd.Store) -> None:
    store.put_state_dict({"weight": MATRIX, "bias": MATRIX[0], "step": 3}, "policy")
    whole, bias = gpu.Array(driver, MATRIX * 0), gpu.Array(driver, MATRIX[0] * 0)
    # The fill waits for the pending write of the stream.
    whole.write(MATRIX + 9)
    into = {"weight": whole, "bias": bias}
    filled, report = store.get_state_dict("policy", into, return_report=True)
    assert filled is into and whole.read() == MATRIX.tobytes() and bias.read() == MATRIX[0].tobytes()
    copies = report.device_copies
    assert copies is not None and copies.pinned + copies.pageable == whole.size + bias.size
    assert (copies.pageable_reason is None) == (copies.pageable == 0)
    part = gpu.Array(driver, np.zeros((100, 300), np.float32))
    box = tssd.TensorSlice((200, 500), (), (512, 1024), (100, 300), ())
    shard = tssd.TensorShard(part, box)
    store.get_state_dict("policy", {"weight": shard}, strict=False)
    assert part.read() == MATRIX[200:300, 500:800].tobytes()
    host = gpu.Array(None, MATRIX * 0)
    store.get("policy", host, fqn="weight")
    assert host.read() == MATRIX.tobytes()
    transposed = gpu.Array(driver, MATRIX * 0, strides=(1, 512))
    store.get("policy", transposed, fqn="weight")
    assert transposed.read() == np.ascontiguousarray(MATRIX.T).tobytes()


def test_shards_of_arrays_are_resharded(driver: gpu.Driver, store: tssd.Store) -> None:
    for rank in range(2):
        local = gpu.Array(driver, MATRIX[rank * 256 : rank * 256 + 256])
        box = tssd.TensorSlice((rank * 256, 0), (rank,), (512, 1024), (256, 1024), (2,))
        shard = {"weight": tssd.TensorShard(local, box)}
        store.put_state_dict(shard, "policy", version=1, writer=rank, writers=[0, 1], job="run")
    part = gpu.Array(driver, np.zeros((512, 512), np.float32))
    shard = tssd.TensorShard(part, tssd.TensorSlice((0, 512), (1,), (512, 1024), (512, 512), (2,)))
    store.get_state_dict("policy", {"weight": shard})
    assert part.read() == np.ascontiguousarray(MATRIX[:, 512:]).tobytes()


def test_device_residency_keeps_arrays_on_device(driver: gpu.Driver, tmp_path: Path) -> None:
    weight, half = gpu.Array(driver, MATRIX), gpu.Array(driver, (MATRIX % 2048).astype(np.float16))
    state = {"model": {"weight": weight, "half": half}, "step": 3}
    if_possible = tssd.PutOptions(residency="device")
    on_device = tssd.PutOptions(residency="device", require_transport="cuda_ipc")
    with Daemon(tmp_path / "socket") as url, tssd.Store(url) as writer, tssd.Store(url) as reader:
        for step in range(4):
            weight.write(MATRIX + step)
            report = writer.put_state_dict(state, "policy", options=on_device)
            weight.write(MATRIX - 1)
            copies = report.device_copies
            assert copies is not None and report.transport == "cuda_ipc" and "GPU-" in report.transport_reason
            assert (copies.device, copies.pinned, copies.pageable) == (weight.size + half.size, 0, 0)
            into = gpu.Array(driver, MATRIX * 0)
            part = gpu.Array(driver, np.zeros((100, 300), np.float32))
            target = {"model": {"weight": into}}
            _, got = reader.get_state_dict("policy", target, strict=False, return_report=True)
            assert into.read() == (MATRIX + step).tobytes() and got.transport == "cuda_ipc"
            assert got.device_copies is not None and got.device_copies.device == into.size
            box = tssd.TensorSlice((200, 500), (), (512, 1024), (100, 300), ())
            reader.get_state_dict("policy", {"model.weight": tssd.TensorShard(part, box)}, strict=False)
            assert part.read() == (MATRIX + step)[200:300, 500:800].tobytes()
            loaded = reader.get_state_dict("policy", require_transport="cuda_ipc")
            assert element_bytes(loaded["model"]["weight"]) == (MATRIX + step).tobytes() and loaded["step"] == 3
            assert element_bytes(loaded["model"]["half"]) == half.read()
            driver.wait()
        with writer.publish("policy", bucket_bytes=1 << 20, options=on_device) as publisher:
            weight.write(MATRIX + 9)
            publisher.put("model.weight", weight)
            publisher.flush()
            weight.write(MATRIX)
        assert publisher.report.device_copies.device == weight.size
        assert element_bytes(reader.get("policy", fqn="model.weight")) == (MATRIX + 9).tobytes()
        assert report.digest != writer.put_state_dict(state, "policy", options=if_possible).digest
        with pytest.raises(tssd.TssdValueError, match="residency=host"):
            writer.put_state_dict(state, "policy", durability="disk", options=if_possible)
    store = tssd.Store("memory:")
    assert "a daemon of this host" in store.put_state_dict(state, "policy", options=if_possible).transport_reason
    with pytest.raises(tssd.TssdValueError, match="cuda_ipc is required"):
        store.put_state_dict(state, "policy", options=on_device)


@pytest.mark.parametrize("residency", ["ring", "in_place", tssd.Ring(bucket_bytes=300 << 10, buckets=3)])
def test_arrays_are_sent_through_ring(driver: gpu.Driver, tmp_path: Path, residency: Any) -> None:
    weight, half = gpu.Array(driver, MATRIX), gpu.Array(driver, (MATRIX % 2048).astype(np.float16))
    state = {"model": {"weight": weight, "half": half}}
    part = gpu.Array(driver, np.zeros((100, 300), np.float32))
    into = {"half": gpu.Array(driver, np.zeros(MATRIX.shape, np.float16)), "weight": gpu.Array(driver, MATRIX * 0)}
    box = tssd.TensorSlice((200, 500), (), (512, 1024), (100, 300), ())
    options = tssd.PutOptions(residency=residency)
    with Daemon(tmp_path / "socket") as url, tssd.Store(url) as writer, tssd.Store(url) as reader:
        required = "cuda_ipc" if residency != "in_place" else None
        whole = reader.receiver("policy", {"model": into}, require_transport=required)
        sliced = reader.receiver("policy", {"model.weight": tssd.TensorShard(part, box)})
        with whole, sliced, ThreadPoolExecutor() as pool:
            for step in range(3):
                weight.write(MATRIX + step)
                received = [pool.submit(receiver.receive, 60) for receiver in (whole, sliced)]
                report = writer.put_state_dict(state, "policy", timeout=60, options=options)
                weight.write(MATRIX - 1)
                assert report.transport == "cuda_ipc" and "2 readers took it" in report.transport_reason
                reports = [each.result() for each in received]
                assert [each.version for each in reports] == [step + 1, step + 1]
                assert reports[0].buckets == (1 if isinstance(residency, str) else reports[0].buckets)
                assert into["weight"].read() == (MATRIX + step).tobytes() and into["half"].read() == half.read()
                assert part.read() == (MATRIX + step)[200:300, 500:800].tobytes()
                copies = reports[0].device_copies
                assert copies is not None and copies.device == weight.size + half.size
        with pytest.raises(ValueError, match="closed"):
            whole.receive()
        # The daemon handles the close of the receivers before it answers this request.
        assert not reader.exists("policy")
        with pytest.raises(tssd.TssdTimeoutError, match="open a receiver"):
            writer.put_state_dict(state, "policy", timeout=0.1, options=options)
        mixed_state = {"weight": into["weight"], "host": np.zeros(3)}
        with pytest.raises(tssd.TssdValueError, match="a receiver for each"):
            reader.receiver("policy", mixed_state)
    driver.wait()


def test_arrays_are_saved(driver: gpu.Driver, tmp_path: Path) -> None:
    weight = gpu.Array(driver, MATRIX)
    tssd.save_file({"a": weight, "b": weight}, tmp_path / "x.tssd", compression="zstd", digest="blake3")
    loaded = tssd.load_file(tmp_path / "x.tssd")
    assert element_bytes(loaded["a"]) == MATRIX.tobytes() == element_bytes(loaded["b"])
    assert (tmp_path / "x.tssd").stat().st_size < 2 * MATRIX.nbytes
    assert tssd.save({"a": weight}) == tssd.save({"a": gpu.Array(None, MATRIX)})


def test_unsupported_arrays_are_rejected(driver: gpu.Driver) -> None:
    store = tssd.Store("memory:")
    for wrong, text in [
        (gpu.Array(driver, MATRIX, strides=(-1024, 1)), "backwards"),
        (gpu.Array(driver, MATRIX, lanes=2), "2 lanes is no dtype"),
        (gpu.Array(driver, MATRIX, version=2), "version 2 of DLPack"),
    ]:
        with pytest.raises(tssd.TssdTypeError, match=text) as error:
            store.put_state_dict({"model": {"weight": wrong}}, "policy")
        assert error.value.fqn == "model.weight"
    with pytest.raises(tssd.TssdTypeError, match="transfer_dtype"):
        store.put_state_dict({"weight": gpu.Array(driver, MATRIX)}, "policy", transfer_dtype="bfloat16")
    state = {"weight": gpu.Array(driver, MATRIX), "step": gpu.Array(driver, np.int64(3))}
    options = tssd.PutOptions(keep_dtype=["weight"])
    store.put_state_dict(state, "policy", transfer_dtype="bfloat16", options=options)
    for wrong, text in [
        (gpu.Array(driver, MATRIX, is_writable=False), "may be written"),
        (gpu.Array(driver, MATRIX, version=None), "may be written"),
    ]:
        before = wrong.read()
        with pytest.raises(tssd.TssdTypeError, match=text):
            store.get("policy", wrong, fqn="weight")
        assert wrong.read() == before
    half = {"weight": gpu.Array(driver, (MATRIX % 2048).astype(np.float16))}
    with pytest.raises(tssd.TssdTypeError, match="tensor of torch"):
        store.get_state_dict("policy", half, strict=False, cast=True)
    with pytest.raises(tssd.TssdTypeError, match="is float16, stored float32"):
        store.get_state_dict("policy", half, strict=False)
    invalid = gpu.Array(driver, MATRIX)
    invalid.pointer = 4096
    with pytest.raises(tssd.TssdError, match="no memory of a GPU"):
        store.put_state_dict({"weight": invalid}, "policy")


@pytest.mark.skipif(not HAS_CUDA, reason="torch sees no GPU")
class TestTensors:
    """Tensors of torch in GPU memory."""

    def test_tensors_roundtrip(self, store: tssd.Store) -> None:
        matrix = torch.from_numpy(MATRIX)
        linear = torch.nn.Linear(64, 32).cuda()
        state = {
            "weight": torch.empty_like(matrix, device="cuda"),
            "linear": dict(linear.state_dict()),
            "parameter": torch.nn.Parameter(matrix[:5].cuda()),
            "half": matrix.cuda().to(torch.bfloat16),
            "eight": matrix.cuda().to(torch.float8_e4m3fn),
            "conjugate": torch.ones(3, dtype=torch.complex64, device="cuda").mul(1j).conj(),
            "empty": torch.empty(0, 2, device="cuda"),
        }
        state["turned"], state["part"] = state["weight"].T, state["weight"][3:7, 1:]
        stream = torch.cuda.Stream()
        for step in range(3):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                state["weight"].copy_(matrix.cuda() + step)
                report = store.put_state_dict(state, "policy")
                state["weight"].zero_()
            copies = report.device_copies
            assert copies is not None and (copies.pageable == 0) == (report.transport == "shared_memory")
            loaded = store.get_state_dict("policy")
            assert torch.equal(loaded["weight"], matrix + step) and torch.equal(loaded["turned"], loaded["weight"].T)
            assert loaded["part"].untyped_storage().data_ptr() == loaded["weight"].untyped_storage().data_ptr()
            assert isinstance(loaded["parameter"], torch.nn.Parameter)
            for name in ("parameter", "half", "eight", "conjugate", "empty"):
                assert element_bytes(loaded[name].detach()) == element_bytes(
                    state[name].detach().resolve_conj().cpu()
                ), name

    def test_tensors_are_filled(self, store: tssd.Store) -> None:
        matrix = torch.from_numpy(MATRIX)
        store.put_state_dict({"weight": matrix, "bias": matrix[0]}, "policy")
        weight, bias = torch.zeros(512, 1024, device="cuda"), torch.zeros(1024, device="cuda", dtype=torch.bfloat16)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            weight.fill_(9)
            into = {"weight": weight, "bias": bias}
            _, report = store.get_state_dict("policy", into, cast=True, return_report=True)
            doubled = weight * 2
        stream.synchronize()
        assert torch.equal(weight.cpu(), matrix) and torch.equal(doubled.cpu(), matrix * 2)
        assert torch.equal(bias.cpu(), matrix[0].to(torch.bfloat16))
        assert report.device_copies.pinned + report.device_copies.pageable == 4 * (matrix.numel() + 1024)
        transposed = torch.zeros(1024, 512, device="cuda").T
        store.get("policy", transposed, fqn="weight")
        assert torch.equal(transposed.cpu(), matrix)
