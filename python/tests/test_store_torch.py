"""Tensors of torch in stores: round trips, ownership of memory, and fills."""

from __future__ import annotations

import gc
import math
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import tssd
from counting_proxy import CountingProxy
from equality import element_bytes, same
from processes import Daemon
from test_store import store as store
from test_torch import DTYPES, QUANTIZED, make_tensor
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from tssd import _ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def make_zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a zeroed contiguous tensor of the same shape and dtype, which may be any dtype."""
    raw = torch.zeros(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
    empty = torch.empty((0,), dtype=tensor.dtype)
    strides = torch.empty(tensor.shape, device="meta").stride()
    return empty.set_(raw.untyped_storage(), 0, tensor.shape, strides)


def test_to_meta_returns_meta_tensors(store: tssd.Store) -> None:
    weight = nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16).T)
    state = {"w": weight, "list": [np.ones(2), "text" * 100, b"bytes"], "step": 3, "shape": torch.Size([2])}
    store.put_state_dict(state, "policy")
    half = tssd.TensorSlice([0], None, [4], [4], [])
    store.put_state_dict({"w": tssd.TensorShard(torch.ones(4), half)}, "shards", writer=0, writers=1, job="x")
    with store.open("policy") as version, store.open("shards") as shards:
        meta = version.to_meta()
        assert shards.to_meta()["w"].shape == (4,)
    assert isinstance(meta["w"], nn.Parameter) and meta["w"].device.type == "meta"
    assert (meta["w"].dtype, meta["w"].shape) == (weight.dtype, weight.shape)
    array, *others = meta["list"]
    assert (array.device.type, array.dtype, array.shape) == ("meta", torch.float64, (2,))
    assert others == state["list"][1:] and meta["step"] == 3 and meta["shape"] == torch.Size([2])


def test_each_process_group_has_its_own_job(tmp_path: Path) -> None:
    jobs = []
    for name in ("first", "second"):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/{name}", world_size=1, rank=0)
        jobs += [_ranks.job(), _ranks.job()]
        dist.destroy_process_group()
    assert jobs[0] == jobs[1] != jobs[2] == jobs[3]


def test_every_dtype_roundtrips(store: tssd.Store) -> None:
    state = {str(dtype): make_tensor(dtype, (2, 3, 4)).permute(2, 0, 1) for dtype in DTYPES if dtype not in QUANTIZED}
    assert len(state) > 30
    store.put_state_dict(state, "x")
    assert same(store.get_state_dict("x"), state)
    into = {name: make_zeros(tensor) for name, tensor in state.items()}
    store.get_state_dict("x", into)
    box = tssd.TensorSlice([1, 0, 1], None, [4, 2, 3], [2, 2, 1], [])
    for name, tensor in state.items():
        assert element_bytes(into[name]) == element_bytes(tensor), name
        size = tensor.element_size()
        part = store.get("x", fqn=name, tensor_slice=box)
        flat = tensor.as_strided((2, 2, 1), tensor.stride(), 1 * tensor.stride(0) + 1 * tensor.stride(2))
        assert (
            part.dtype is tensor.dtype
            and element_bytes(part) == element_bytes(flat)
            and len(element_bytes(part)) == 4 * size
        ), name


@pytest.mark.parametrize("dtype", sorted(QUANTIZED, key=str), ids=str)
def test_quantized_tensors_are_rejected(dtype: torch.dtype) -> None:
    memory = tssd.Store("memory:")
    with pytest.raises(TypeError, match="quantized") as caught:
        memory.put_state_dict({"a": {"b": make_tensor(dtype)}}, "x")
    assert caught.value.fqn == "a.b" and not memory.exists("x")  # type: ignore[attr-defined]


def test_tensor_properties_roundtrip(store: tssd.Store) -> None:
    x = torch.randn(4, 5, dtype=torch.complex64)
    weight = nn.Parameter(torch.randn(3, 4))
    state = {
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "every second": torch.randn(4, 8)[:, ::2],
        "expanded": torch.randn(1, 3).expand(1_000_000, 3),
        "no dimensions": torch.tensor(2.5),
        "nothing": torch.empty(3, 0, 2).transpose(0, 2),
        "embed": weight,
        "head": weight,
        "frozen": nn.Parameter(torch.ones(3), requires_grad=False),
    }
    computed = {"conj": x.conj(), "neg": x.conj().imag, "zero": torch._efficientzerotensor(3)}
    store.put_state_dict(state | computed, "x")
    got = store.get_state_dict("x")
    assert same({name: got[name] for name in state}, state)
    assert got["expanded"].untyped_storage().nbytes() == 12
    assert got["embed"].data_ptr() == got["head"].data_ptr()
    for name, expected in computed.items():
        assert not got[name].is_conj() and not got[name].is_neg()
        assert torch.equal(got[name], expected.clone())


@pytest.mark.parametrize("pair", ["float32 bfloat16", "float32 float16", "float64 float32", "bfloat16 float32", "float16 float32"])
def test_cast_equals_that_of_torch(store: tssd.Store, pair: str) -> None:
    source, target = (getattr(torch, name) for name in pair.split())
    base = torch.randn(40, 50).to(source)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-42, 65_519.9, 65_520.0, 3.4e38, -1e-8]).to(source)
    state = {
        "base": base,
        "transposed": base.T,
        "row": base[7],
        "every third": base.flatten()[5::3],
        "expanded": base[:1].expand(60, 50),
        "scalar": base[3, 4],
        "nothing": base[:0],
        "special": special,
        # A cast is done in blocks: this tensor has several, and ends within one.
        "large": torch.randn(700, 501).to(source),
        "parameter": nn.Parameter(base[2:5]),
    }
    report = store.put_state_dict(state, "x", transfer_dtype=target)
    with store.publish("parts", bucket_bytes=1 << 16, transfer_dtype=target) as publisher:
        for name, tensor in state.items():
            publisher.put(name, tensor)
    for got in (store.get_state_dict("x"), store.get_state_dict("parts")):
        for name, tensor in state.items():
            expected = tensor.detach().to(target)
            assert got[name].dtype == target and got[name].shape == expected.shape, name
            assert torch.equal(got[name].nan_to_num(1234.0), expected.nan_to_num(1234.0)), name
            assert torch.equal(got[name].isnan(), expected.isnan()), name
            assert torch.equal(got[name].signbit()[~expected.isnan()], expected.signbit()[~expected.isnan()]), name
    got = store.get_state_dict("x")
    assert got["base"].untyped_storage().data_ptr() == got["transposed"].untyped_storage().data_ptr()
    assert isinstance(got["parameter"], nn.Parameter)
    # Tied tensors are stored once, and of an expanded one no more than its memory.
    assert report.bytes < (40 * 50 + 700 * 501) * target.itemsize + 40_000


def test_cast_stores_no_gaps(store: tssd.Store) -> None:
    whole = torch.randn(1000, 500)
    part = whole[:, :10]
    for value, dtype in ((part, torch.bfloat16), (part.numpy(), torch.float16)):
        report = store.put_state_dict({"w": value}, "x", transfer_dtype=dtype)
        assert report.bytes < part.numel() * 2 + 20_000
        got = store.get_state_dict("x")["w"]
        assert torch.equal(torch.from_numpy(got.copy()) if isinstance(got, np.ndarray) else got, part.to(dtype))


@pytest.mark.parametrize("kind", ["put", "publish", "later"])
def test_check_finite_names_the_element(store: tssd.Store, kind: str) -> None:
    def put(state: dict[str, Any], **more: Any) -> Any:
        options = tssd.PutOptions(check_finite=True)
        if kind == "put":
            return store.put_state_dict(state, "x", options=options, **more)
        if kind == "later":
            return store.put_state_dict(state, "x", options=options, wait=False, **more).result(30)
        with store.publish("x", options=options, bucket_bytes=64, **more) as publisher:
            for name, tensor in state.items():
                publisher.put(name, tensor)
        return None

    weight = torch.ones(6, 8)
    put({"w": weight, "ids": torch.arange(3)})
    for value in (math.nan, math.inf, -math.inf):
        bad = weight.clone()
        bad[4, 5] = value
        with pytest.raises(ValueError, match=r"(?s)elements are NaN or infinite: the first is in `layer.w` at \[4, 5\].*check_finite"):
            put({"a": weight, "layer.w": bad})
    big = weight.clone()
    big[2, 3] = 70_000.0
    # It is infinite only in the dtype in which it is stored.
    put({"w": big})
    with pytest.raises(ValueError, match="`w` at"):
        put({"w": big}, transfer_dtype=torch.float16)
    # Elements between those of a tensor are not stored.
    gaps = torch.full((6, 16), math.nan)
    gaps[:, ::2] = 1
    put({"w": gaps[:, ::2]})
    shard = tssd.TensorShard(torch.tensor([1.0, math.nan]), tssd.TensorSlice([2], None, [4], [2], None))
    with pytest.raises(ValueError, match=r"`w` at \[3\]"):
        put({"w": shard}, writers=2, writer=1, job="run")
    assert same(store.get_state_dict("x"), {"w": gaps[:, ::2]}) or kind != "put"
    assert "x" in store.keys()


def test_slice_over_tcp_receives_its_box(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "socket", "--listen", "127.0.0.1:0")
    with daemon as url, tssd.Store(url) as local:
        whole = torch.randn(4096, 1024)
        local.put_state_dict({"w": whole}, "x")
        for verify in (True, False):
            proxy = CountingProxy(daemon.startup_line.split()[-1])
            with tssd.Store(proxy.address) as store, store.open("x", verify=verify) as version:
                for start, stop in ((256, 384), (2000, 2010)):
                    before = proxy.received
                    part = version.get_slice("w")[start:stop]
                    assert torch.equal(part, whole[start:stop])
                    box = tssd.TensorSlice([start, 0], None, [4096, 1024], [stop - start, 1024], None)
                    assert torch.equal(version.get_tensor("w", box), whole[start:stop])
                    # Only whole chunks can be verified.
                    assert proxy.received - before < 2 * (part.nbytes + (2 << 20))
            proxy.close()


def test_cast_in_parts_equals_whole_cast(store: tssd.Store) -> None:
    weight = nn.Parameter(torch.randn(7, 33))
    state = {"w": weight, "t": weight.detach().T, "e": torch.randn(5, 1).expand(5, 40), "f": torch.randn(9, 9).half()}
    store.put_state_dict(state, "whole", transfer_dtype=torch.bfloat16)
    with store.publish("parts", bucket_bytes=128, transfer_dtype=torch.bfloat16) as publisher:
        for name, tensor in state.items():
            publisher.put(name, tensor)
    whole, parts = store.get_state_dict("whole"), store.get_state_dict("parts")
    for name in state:
        assert parts[name].dtype == torch.bfloat16 and torch.equal(parts[name], whole[name]), name
    assert isinstance(parts["w"], nn.Parameter) and parts["w"].requires_grad


def test_parts_of_cast_shard_keep_its_offsets(store: tssd.Store) -> None:
    expected = torch.randn(10, 33)
    for version, primary in ((1, True), (2, False)):
        # In version 2, writer 1 has a replica, which is not stored again.
        cuts = [slice(0, 4), slice(4, 10)] if primary else [slice(0, 10)] * 2
        for writer, rows in enumerate(cuts):
            part = tssd.TensorSlice([rows.start, 0], None, [10, 33], [rows.stop - rows.start, 33], [])
            shard = tssd.TensorShard(expected[rows], part, primary or writer == 0)
            with store.publish(
                "x", version=version, writer=writer, writers=2, job="run", bucket_bytes=128, transfer_dtype="float64"
            ) as publisher:
                publisher.put("w", shard)
            assert publisher.report is not None and publisher.report.visible == (writer == 1)
            # Buckets have 128 bytes, elements 8 bytes. A replica is neither cast nor written.
            assert (publisher.report.bytes > 50_000) == (primary or writer == 0)
        got = store.get_state_dict("x", version=version)["w"]
        assert torch.equal(got, expected.double())
        box = tssd.TensorSlice([3, 1], None, [10, 33], [2, 30], [])
        assert torch.equal(store.get("x", fqn="w", tensor_slice=box), expected[3:5, 1:31].double())


def test_shard_of_several_boxes_is_cast_in_parts(store: tssd.Store) -> None:
    expected = torch.randn(12, 34)

    def shard(rows: list[int], columns: list[int]) -> tssd.TensorShard:
        """Returns a shard of boxes of 3 rows and 17 columns, which begin at these rows and columns."""
        boxes = [tssd.TensorSlice([row, column], None, [12, 34], [3, 17], []) for row in rows for column in columns]
        local = torch.cat([torch.cat([expected[r : r + 3, c : c + 17] for c in columns], 1) for r in rows])
        return tssd.TensorShard(local, boxes)

    # With the last bucket size, a part contains elements of several boxes.
    for version, bucket_bytes in enumerate((16, 128, 1024, 3000), 1):
        for writer, rows in enumerate(([0, 6], [3, 9])):
            with store.publish(
                "x", version=version, writer=writer, writers=2, job="run", bucket_bytes=bucket_bytes, transfer_dtype="float64"
            ) as publisher:
                publisher.put("w", shard(rows, [0, 17]))
        assert torch.equal(store.get_state_dict("x", version=version)["w"], expected.double()), bucket_bytes
    into = shard([3, 6], [17, 0])
    into.local.zero_()
    store.get_state_dict("x", {"w": into}, cast=True)
    assert torch.equal(into.local, torch.cat([expected[3:9, 17:], expected[3:9, :17]], 1))


def test_unsupported_tensor_is_rejected_before_cast(store: tssd.Store) -> None:
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    refused = {
        "to_dense": [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()],
        "unbind": [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])],
        "materialize": [torch.ones(3, device="meta")],
        "dequantize": [torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)],
        "gather it": [freed],
    }
    for advice, tensors in refused.items():
        for tensor in tensors:
            with pytest.raises(tssd.TssdError, match=f"in `a.w`.*{advice}") as whole:
                store.put_state_dict({"a": {"w": tensor}}, "x", transfer_dtype="bfloat16")
            assert whole.value.fqn == "a.w"
            with pytest.raises(tssd.TssdError, match=f"in `w`.*{advice}"):
                with store.publish("x", bucket_bytes=4, transfer_dtype="bfloat16") as publisher:
                    publisher.put("w", tensor)
    zeros = torch._efficientzerotensor(3)
    for bucket_bytes in (4, 1 << 20):
        with store.publish("x", bucket_bytes=bucket_bytes, transfer_dtype="float64") as publisher:
            publisher.put("w", zeros)
        assert torch.equal(store.get_state_dict("x")["w"], torch.zeros(3, dtype=torch.float64))


class Table(torch.Tensor):
    """A tensor of which some rows are in local tensors that declare their own offsets."""

    rows: list[tuple[int, torch.Tensor]]

    @staticmethod
    def __new__(cls, shape: torch.Size, rows: list[tuple[int, torch.Tensor]]) -> Table:
        table = torch.empty(shape, device="meta").as_subclass(cls)
        table.rows = rows
        return table

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size((at, 0)), local.shape) for at, local in self.rows]

    def local_shards(self) -> list[torch.Tensor]:
        return [local for _, local in self.rows]


def test_local_tensors_with_declared_offsets_are_cast_in_parts(store: tssd.Store) -> None:
    expected = torch.randn(12, 33)
    for version, bucket_bytes in enumerate((16, 128, 1024, 3000, 1 << 20), 1):
        sizes = []
        for writer, rows in enumerate(([(6, 9), (0, 2)], [(9, 12), (4, 4), (2, 6)])):
            table = Table(expected.shape, [(at, expected[at:end]) for at, end in rows])
            with store.publish(
                "x", version=version, writer=writer, writers=2, job="run", bucket_bytes=bucket_bytes, transfer_dtype="float64"
            ) as publisher:
                publisher.put("w", table)
            assert publisher.report is not None
            sizes.append(publisher.report.bytes)
        # Each part is an archive of at least 4 KB. The 165 and 231 elements themselves have 1 to 2 KB.
        assert [size > 15_000 for size in sizes] == [bucket_bytes <= 1024] * 2, (bucket_bytes, sizes)
        got = store.get_state_dict("x", version=version)["w"]
        assert got.dtype == torch.float64 and torch.equal(got, expected.double()), bucket_bytes


def test_declared_chunks_must_match_local_tensors(store: tssd.Store) -> None:
    table = Table(torch.Size((4, 2)), [(0, torch.ones(2, 2)), (2, torch.ones(2, 2))])
    for local in ([], [torch.ones(2, 2)], [torch.ones(2, 2), torch.ones(1, 2)], [torch.ones(2, 2)] * 3):
        table.local_shards = lambda local=local: local
        with pytest.raises(TypeError, match="chunks.*Table.*in `w`.*TensorShard"):
            store.put_state_dict({"w": table}, "x", writer=0, writers=1)
    mixed = Table(torch.Size((4, 2)), [(0, torch.ones(2, 2)), (2, torch.ones(2, 2, dtype=torch.int64))])
    with pytest.raises(TypeError, match="several dtypes.*Table.*in `w`"):
        store.put_state_dict({"w": mixed}, "x", writer=0, writers=1)


def test_tensor_without_rows_is_reported_missing(store: tssd.Store) -> None:
    nothing = Table(torch.Size((0, 2)), [])
    store.put_state_dict({"w": nothing, "a": torch.ones(2)}, "x", writer=0, writers=1, job="run")
    into = {"w": nothing, "a": torch.zeros(2)}
    _, report = store.get_state_dict("x", into, return_report=True)
    assert torch.equal(into["a"], torch.ones(2)) and report.missing_keys == ["w"]


def test_lazily_negated_tensor_is_cast_to_its_values(store: tssd.Store) -> None:
    complex_tensor = torch.randn(40, dtype=torch.complex64)
    state = {"re": complex_tensor.real, "im": complex_tensor.conj().imag, "first": complex_tensor.conj().imag[:3]}
    store.put_state_dict(state, "x", transfer_dtype="float64")
    with store.publish("y", bucket_bytes=64, transfer_dtype="float64") as publisher:
        for name, tensor in state.items():
            publisher.put(name, tensor)
    for key in ("x", "y"):
        for name, tensor in store.get_state_dict(key).items():
            assert torch.equal(tensor, state[name].double()), (key, name)


def test_tensors_of_any_layout_are_filled(store: tssd.Store) -> None:
    state = {
        "image": torch.randn(2, 3, 4, 5),
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.randn(1, 3).expand(6, 3),
        "q": torch.randn(4, 8),
        "k": torch.randn(2, 8),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(2.5),
        "step": 3,
    }
    store.put_state_dict(state, "x")
    fused, wide = torch.zeros(7, 8), torch.zeros(12, 3)
    parameter = nn.Parameter(torch.zeros(()))
    into = {
        "image": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "last": torch.zeros(5, 4, 3, 2).permute(3, 2, 1, 0),
        "expanded": wide[::2],
        "q": fused[:4],
        "k": fused[4:6],
        "conj": torch.zeros(3, dtype=torch.complex64),
        "scalar": parameter,
        "step": 0,
    }
    assert store.get_state_dict("x", into) is into
    for name, tensor in state.items():
        assert name == "step" or torch.equal(into[name], tensor), name  # type: ignore[arg-type]
    assert not wide[1::2].any() and not fused[6].any()
    assert parameter.requires_grad and parameter.is_leaf and parameter == 2.5


def make_invalid_targets() -> dict[str, Any]:
    return {
        "shape": torch.zeros(3, 2),
        "flat": torch.zeros(6),
        "float64": torch.zeros(2, 3, dtype=torch.float64),
        "int32": torch.zeros(2, 3, dtype=torch.int32),
        "expanded": torch.zeros(1, 3).expand(2, 3),
        "overlapping": torch.zeros(10).as_strided((2, 3), (1, 1)),
        "neg": torch._neg_view(torch.zeros(2, 3)),
        "meta": torch.empty(2, 3, device="meta"),
        "sparse": torch.zeros(2, 3).to_sparse(),
        "another slice": tssd.TensorShard(torch.zeros(2, 3), tssd.TensorSlice([2, 0], None, [4, 3], [2, 3], [])),
        "no tensor": 3,
    }


@pytest.mark.parametrize("name", list(make_invalid_targets()))
def test_invalid_target_is_rejected_before_any_write(name: str) -> None:
    memory = tssd.Store("memory:")
    memory.put_state_dict({"good": torch.ones(3), "bad": torch.ones(2, 3)}, "x")
    good, bad = torch.zeros(3), make_invalid_targets()[name]
    with pytest.raises(tssd.TssdError) as caught:
        memory.get_state_dict("x", {"good": good, "bad": bad})
    assert "bad" in str(caught.value)
    assert isinstance(caught.value, (TypeError, ValueError))
    assert not good.any()


def test_all_mismatches_are_in_one_error(store: tssd.Store) -> None:
    state = {"model": {"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(3), "d": torch.ones(3)}}
    store.put_state_dict(state, "x")
    good = torch.zeros(3)
    wrong = {"a": good, "b": torch.zeros(4), "c": torch.zeros(3, dtype=torch.float64), "e": torch.zeros(3)}
    with pytest.raises(tssd.TssdError) as caught:
        store.get_state_dict("x", {"model": wrong})
    assert all(f"model.{name}" in str(caught.value) for name in "bcde"), caught.value
    assert "model.a" not in str(caught.value)
    assert not good.any()


def make_nested(levels: int) -> Any:
    value: Any = torch.zeros(2, 3)
    for _ in range(levels):
        value = [value]
    return value


def test_deep_nesting_is_rejected(store: tssd.Store) -> None:
    with pytest.raises(ValueError, match="64 levels") as caught:
        store.put_state_dict({"x": make_nested(10_000)}, "x")
    assert caught.value.kind == "TooDeep" and not store.exists("x")  # type: ignore[attr-defined]
    store.put_state_dict({"x": torch.ones(2, 3)}, "x")
    with pytest.raises(tssd.TssdError, match="deep"):
        store.get_state_dict("x", {"x": make_nested(10_000)})


def test_put_of_concurrently_modified_dict_is_consistent(store: tssd.Store) -> None:
    state: dict[str, Any] = {str(i): torch.full((10,), i) for i in range(300)}
    stop = threading.Event()

    def change() -> None:
        i = 0
        while not stop.is_set():
            i += 1
            state[f"new {i % 50}"] = torch.full((10,), i)
            state.pop(f"new {(i + 25) % 50}", None)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(20):
            store.put_state_dict(state, "x")
            got = store.get_state_dict("x")
            assert {str(i) for i in range(300)} <= got.keys()
            assert all((got[str(i)] == i).all() for i in range(300))
            assert all((tensor == tensor[0]).all() for tensor in got.values())
    finally:
        stop.set()
        thread.join()


def test_write_to_loaded_tensor_is_private(store: tssd.Store) -> None:
    state = {"big": torch.randn(1000, 1000), "small": torch.arange(10), "tiny": torch.tensor(1)}
    store.put_state_dict(state, "x")
    one, other = store.get_state_dict("x"), store.get_state_dict("x")
    with store.open("x") as version:
        opened = version.get_tensor("big")
        for tensor in one.values():
            tensor.add_(1)
        one["big"][::2].zero_()
        assert same(version.get_tensor("big"), state["big"])
    assert same(opened, state["big"]) and same(other, state)
    assert same(store.get_state_dict("x"), state)
    # Later versions do not reuse memory that views still map.
    for step in range(4):
        store.put_state_dict({name: tensor + step + 1 for name, tensor in state.items()}, "x")
    assert same(other, state)
    assert torch.equal(one["big"][1::2], state["big"][1::2] + 1) and not one["big"][::2].any()
    assert torch.equal(one["small"], state["small"] + 1) and one["tiny"] == 2
    store.put_state_dict(one, "y")
    assert same(store.get_state_dict("y"), one)


def test_forked_child_does_not_end_leases_of_parent(tmp_path: Path) -> None:
    state = {"a": torch.arange(400_000)}
    with Daemon(tmp_path / "socket") as url, tssd.Store(url) as store:
        store.put_state_dict(state, "x")
        got, opened = store.get_state_dict("x"), store.open("x")
        with store.publish("y", version=1) as publisher:
            publisher.put("a", state["a"])
            publisher.flush()
            child = os.fork()
            if child == 0:
                ok = False
                try:
                    with pytest.raises(ValueError, match="forked"):
                        publisher.put("b", 1)
                    got.clear()
                    opened.close()
                    gc.collect()
                    ok = True
                finally:
                    os._exit(0 if ok else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            # Without its lease, the memory of the first version would be overwritten.
            for step in range(4):
                store.put_state_dict({"a": torch.full((400_000,), step)}, "x")
            assert same(got, state) and same(opened.get_tensor("a"), state["a"])
            publisher.put("b", 2)
        assert same(store.get_state_dict("y"), {**state, "b": 2})
        opened.close()


def test_views_outlive_version_store_and_daemon(tmp_path: Path) -> None:
    state = {"big": torch.randn(1000, 1000), "small": torch.arange(10)}
    with Daemon(tmp_path / "socket") as url:
        store = tssd.Store(url)
        store.put_state_dict(state, "x")
        got = store.get_state_dict("x")
        row, array = got["big"][7], got["big"].numpy()
        store.delete("x")
        store.close()
        assert same(got, state)
        del store, got
        gc.collect()
    assert torch.equal(row, state["big"][7]) and array[3, 5] == state["big"][3, 5]
    row.zero_()
    assert (array[7] == 0).all() and array[8].any()


@pytest.mark.parametrize("store_kind", ["directory", "daemon"])
def test_forked_child_uses_open_views_and_store(tmp_path: Path, store_kind: str) -> None:
    if store_kind == "directory":
        return check_fork(tssd.Store(str(tmp_path / "store")))
    with Daemon(tmp_path / "socket") as url:
        check_fork(tssd.Store(url))


def check_fork(store: tssd.Store) -> None:
    state = {"a": torch.arange(400_000), "b": torch.ones(5)}
    store.put_state_dict(state, "x")
    got, version = store.get_state_dict("x"), store.open("x")
    child = os.fork()
    if child == 0:
        ok = False
        try:
            got["b"].zero_()
            ok = same(got["a"], state["a"]) and same(store.get_state_dict("x"), state)
            store.put_state_dict({"child": 1}, "y")
        finally:
            os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same(got, state)
    assert store.get_state_dict("y") == {"child": 1}
    assert same(version.get_tensor("a"), state["a"])
    version.close()
    store.put_state_dict({"parent": 2}, "y")
    assert store.get_state_dict("y") == {"parent": 2}
