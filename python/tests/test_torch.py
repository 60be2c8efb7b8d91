"""Tensors of torch in archives: round trips and ownership of memory."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import tssd
from equality import element_bytes, same
from torch import nn

pytestmark = [
    pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions"),
]

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def make_tensor(dtype: torch.dtype, shape: tuple[int, ...] = (3, 4)) -> torch.Tensor:
    """Returns a tensor of any dtype with varied bit patterns."""
    count = 1
    for size in shape:
        count *= size
    empty = torch.empty((0,), dtype=dtype)
    raw = torch.arange(count * empty.element_size(), dtype=torch.uint8) * 7
    if dtype is torch.bool:
        raw %= 2
    strides = torch.empty(shape, device="meta").stride()
    return empty.set_(raw.untyped_storage(), 0, shape, strides)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_roundtrips(path: Path, dtype: torch.dtype) -> None:
    if dtype in QUANTIZED:
        with pytest.raises(TypeError, match="quantized") as caught:
            tssd.save({"a": {"b": make_tensor(dtype)}})
        assert caught.value.fqn == "a.b"  # type: ignore[attr-defined]
        return
    state = {"a": make_tensor(dtype), "turned": make_tensor(dtype, (2, 3, 4)).permute(2, 0, 1), "dtype": dtype}
    tssd.save_file(state, path)
    for loaded in (
        tssd.load_file(path),
        tssd.load_file(path, backend="pread"),
        tssd.load(tssd.save(state)),
        tssd.TorchStoreStateDict.from_state_dict(state).to_state_dict(),
    ):
        assert same(loaded, state)
    with tssd.safe_open(path, "pt") as file:
        assert same(file.get_tensor("turned"), state["turned"])
        part = file.get_slice("a")[1:, ::2]
        assert part.dtype is dtype and element_bytes(part) == element_bytes(
            make_tensor(dtype).as_strided((2, 2), (4, 2), 4)
        )


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_tensor_properties_roundtrip(path: Path, backend: str) -> None:
    base = torch.randn(4, 3, 8, 8)
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    complex_ = torch.randn(5, dtype=torch.complex64)
    state: dict[str, Any] = {
        "channels last": base.to(memory_format=torch.channels_last),
        "turned": base.permute(3, 1, 0, 2),
        "every second": base[:, :, ::2],
        "expanded": torch.randn(1, 3).expand(1_000_000, 3),
        "no dimensions": torch.tensor(2.5),
        "nothing": torch.empty(0, 3),
        "nothing, strided": torch.empty(3, 0, 2).transpose(0, 2),
        "parameter": nn.Parameter(torch.randn(2, 2)),
        "frozen": frozen,
        "requires_grad": torch.randn(3, requires_grad=True),
        "complex": complex_,
        "real": torch.view_as_real(complex_)[:, 1],
        "size": torch.Size([2, 3]),
        "device": torch.device("cuda", 1),
        "ndarray": np.arange(3),
        "scalar": np.float64(2),
    }
    tssd.save_file(state, path)
    loaded = tssd.load_file(path, backend=backend)
    assert same(loaded, state)
    assert loaded["channels last"].is_contiguous(memory_format=torch.channels_last)
    assert loaded["expanded"].untyped_storage().nbytes() == 12
    assert loaded["complex"].untyped_storage().data_ptr() == loaded["real"].untyped_storage().data_ptr()


def test_lazily_computed_views_are_materialized() -> None:
    x = torch.randn(4, 5, dtype=torch.complex64)
    state = {"conj": x.conj(), "neg": x.conj().imag, "zero": torch._efficientzerotensor(3)}
    assert state["conj"].is_conj() and state["neg"].is_neg()
    loaded = tssd.load(tssd.save(state))
    assert not loaded["conj"].is_conj() and not loaded["neg"].is_neg()
    for key, expected in state.items():
        assert torch.equal(loaded[key], expected.clone())


def test_tied_tensors_are_stored_once_and_loaded_tied(path: Path) -> None:
    weight = nn.Parameter(torch.randn(1000, 100))
    state = {"embed": weight, "head": weight, "rows": weight.data[10:20], "flat": weight.data.view(-1)}
    tssd.save_file(state, path)
    assert path.stat().st_size < 410_000 + 8192
    loaded = tssd.load_file(path)
    start = loaded["embed"].data_ptr()
    assert loaded["head"].data_ptr() == loaded["flat"].data_ptr() == start
    assert loaded["rows"].data_ptr() == start + 10 * 100 * 4
    with torch.no_grad():
        loaded["head"][10] = 7
    assert (loaded["rows"][0] == 7).all()


def test_view_is_stored_without_rest_of_its_storage(path: Path) -> None:
    tssd.save_file({"a": torch.randn(10_000_000)[5:10]}, path)
    assert path.stat().st_size < 8192
    assert tssd.load_file(path)["a"].untyped_storage().nbytes() == 20


def test_module_and_optimizer_state_dicts_roundtrip(path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
    }
    assert isinstance(state["model"], OrderedDict)
    tssd.save_file(state, path)
    loaded = tssd.load_file(path)
    assert same(loaded, state)
    assert loaded["model"]._metadata == state["model"]._metadata
    assert 0 in loaded["optimizer"]["state"]
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    optimizer.step()
    scheduler.load_state_dict(loaded["scheduler"])
    torch.set_rng_state(loaded["rng"])


def test_module_metadata_that_is_not_json_is_rejected() -> None:
    state = nn.Linear(1, 1).state_dict()
    state._metadata[""]["x"] = object()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="_metadata") as caught:
        tssd.save({"model": state})
    assert caught.value.fqn == "model"  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [{}, {"backend": "pread"}, {"verify": "off"}, {"verify": "lazy"}])
def test_write_to_loaded_tensor_is_private(path: Path, options: dict[str, Any]) -> None:
    state = {"big": torch.randn(1000, 1000), "small": torch.arange(10), "tiny": torch.tensor(1)}
    tssd.save_file(state, path)
    before = path.read_bytes()
    one, other = tssd.load_file(path, **options), tssd.load_file(path, **options)
    for tensor in one.values():
        tensor.add_(1)
    one["big"].zero_()
    assert same(other, state)
    assert same(tssd.load_file(path), state)
    assert path.read_bytes() == before


def test_write_to_tensor_of_safe_open_is_private(path: Path) -> None:
    state = {"big": torch.randn(1000, 1000), "small": torch.arange(10)}
    tssd.save_file(state, path)
    with tssd.safe_open(path, "pt") as file:
        for key in state:
            file.get_tensor(key).zero_()
            file.get_slice(key)[1:].zero_()
            assert same(file.get_tensor(key), state[key])


def test_write_to_tensor_loaded_from_bytes_is_private(path: Path) -> None:
    state = {"a": torch.randn(1000)}
    data = tssd.save(state)
    copy = bytes(bytearray(data))
    tssd.load(data)["a"].zero_()
    assert data == copy
    encoded = tssd.TorchStoreStateDict.from_state_dict(state)
    encoded.to_state_dict()["a"].zero_()
    assert same(encoded.to_state_dict(), state)


def count_maps(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_file_is_unmapped_with_its_last_tensor(path: Path) -> None:
    state = {"a": torch.randn(100_000), "b": torch.randn(100_000), "c": 1}
    tssd.save_file(state, path)
    loaded = tssd.load_file(path)
    view = loaded["b"][5:10]
    array = loaded["b"].numpy()
    storage = loaded["a"].untyped_storage()
    del loaded
    gc.collect()
    assert count_maps(path) == 1
    assert torch.equal(view, state["b"][5:10]) and array[0] == state["b"][0]
    del view, array
    gc.collect()
    assert count_maps(path) == 1 and len(storage) == 400_000
    del storage
    gc.collect()
    assert count_maps(path) == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_memory_of_tensor_is_freed_with_it(path: Path, backend: str) -> None:
    def anonymous_bytes() -> int:
        text = Path("/proc/self/smaps_rollup").read_text()
        return int(text.split("Anonymous:")[1].split()[0]) * 1024

    size = 64 << 20
    state = {"a": torch.ones(size, dtype=torch.uint8), "b": torch.ones(1000, dtype=torch.uint8)}
    tssd.save_file(state, path, fsync=False)
    del state
    loaded = tssd.load_file(path, backend=backend)
    loaded["a"].add_(1)
    full = anonymous_bytes()
    del loaded["a"]
    assert full - anonymous_bytes() > size // 2
    assert loaded["b"].sum() == 1000


class Subclass(torch.Tensor):
    pass


def make_unsupported_tensors() -> dict[str, Any]:
    freed = torch.randn(10)
    freed.untyped_storage().resize_(0)
    return {
        "sparse": torch.eye(3).to_sparse(),
        "sparse_csr": torch.eye(3).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "meta": torch.empty(3, device="meta"),
        "freed": freed,
        "Subclass": torch.ones(3).as_subclass(Subclass),
        "UninitializedParameter": nn.LazyLinear(3).weight,
        "Generator": torch.Generator(),
        "Linear": nn.Linear(1, 1),
    }


@pytest.mark.filterwarnings("ignore:.*prototype stage")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("name", "sparse sparse_csr nested jagged quantized meta freed Subclass UninitializedParameter Generator Linear".split())
def test_unsupported_tensors_are_rejected(name: str) -> None:
    with pytest.raises(TypeError) as caught:
        tssd.save({"a": [make_unsupported_tensors()[name]]})
    error = caught.value
    assert isinstance(error, tssd.TssdError)
    assert error.fqn == "a.0" and error.advice
    assert name.partition("_")[0].lower() in str(error).lower() or name == "jagged"


def test_cloudpickle_is_used_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = []

    def dumps(value: object) -> bytes:
        objects.append(value)
        return pickle.dumps(("by it", value))

    for module in (SimpleNamespace(dumps=dumps), None):
        monkeypatch.setitem(sys.modules, "cloudpickle", module)
        data = tssd.save({"a": ...}, allow_pickle=True)
        got = tssd.load(data, allow_pickle=True)["a"]
        assert got == (("by it", ...) if module else ...)
    assert objects == [...]


def test_tensor_subclass_is_rejected_even_with_allow_pickle() -> None:
    with pytest.raises(TypeError, match="Subclass"):
        tssd.save({"a": torch.ones(3).as_subclass(Subclass)}, allow_pickle=True)


def test_states_of_schedulers_and_generators_roundtrip() -> None:
    import random

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 2])
    optimizer.step()
    scheduler.step()
    state = {
        "scheduler": scheduler.state_dict(),
        "random": random.getstate(),
        "numpy": np.random.default_rng(1).bit_generator.state,
    }
    loaded = tssd.load(tssd.save(state))
    assert loaded == state
    assert type(loaded["scheduler"]["milestones"]) is type(state["scheduler"]["milestones"])


def test_layouts_and_memory_formats_roundtrip() -> None:
    kinds = (torch.layout, torch.memory_format)
    state = {name: value for name, value in vars(torch).items() if isinstance(value, kinds)}
    assert len(state) > 6
    loaded = tssd.load(tssd.save(state))
    assert all(loaded[name] is value for name, value in state.items())


@pytest.mark.parametrize("kind", ["torch.layout", "torch.memory_format"])
@pytest.mark.parametrize("name", ["onnx", "strides", "_dynamo", "float32", "nn"])
def test_constant_of_torch_is_no_other_attribute(kind: str, name: str) -> None:
    from tssd import _classes

    before = set(sys.modules)
    assert isinstance(_classes.compose(kind, 0, name), _classes.Refusal)
    assert set(sys.modules) == before


def test_save_waits_for_async_collective_tensor() -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    tensor = AsyncCollectiveTensor(torch.arange(3.0))
    loaded = tssd.load(tssd.save({"a": tensor}))
    assert type(loaded["a"]) is torch.Tensor and torch.equal(loaded["a"], torch.arange(3.0))


def test_load_places_tensors_on_device(path: Path) -> None:
    state = {"a": torch.randn(3, 4).t(), "b": torch.ones(2, dtype=torch.bfloat16), "n": np.arange(3)}
    tssd.save_file(state, path)
    loaded = tssd.load_file(path, device="meta")
    assert loaded["a"].device.type == "meta" and loaded["a"].stride() == (1, 4)
    assert same(loaded["n"], state["n"])
    with tssd.safe_open(path, "pt", device="meta") as file:
        assert file.get_tensor("a").device.type == "meta"
        assert file.get_slice("a")[1:].shape == (3, 3)
        assert pickle.loads(pickle.dumps(file)).get_tensor("a").device.type == "meta"
    with pytest.raises(RuntimeError):
        tssd.load_file(path, device="no such device")


def test_slices_equal_those_of_torch(path: Path) -> None:
    tensor = torch.randn(100, 50, 4).transpose(0, 2)
    tssd.save_file({"a": tensor}, path)
    with tssd.safe_open(path, "pt") as file:
        part = file.get_slice("a")
        assert part.get_shape() == [4, 50, 100]
        for index in np.s_[1, -1, 1:3, ..., :, (1, 2, 3), (..., 5), (slice(0, 4, 2), slice(10, 50, 7)), 4:]:
            assert torch.equal(part[index], tensor[index])
        with pytest.raises(ValueError):
            part[::-1]
        assert torch.equal(part[torch.tensor([1])], tensor[[1]])
        assert part[None, 1:3].untyped_storage().nbytes() < tensor.nbytes == 80_000


def test_framework_numpy_returns_arrays(path: Path) -> None:
    state = {"a": torch.arange(6.0).reshape(2, 3).t(), "p": nn.Parameter(torch.ones(2))}
    tssd.save_file(state, path)
    loaded = tssd.load_file(path, framework="numpy")
    assert isinstance(loaded["a"], np.ndarray) and loaded["a"].strides == (4, 12)
    np.testing.assert_array_equal(loaded["a"], state["a"].numpy())


def test_arrays_loaded_next_to_tensors_are_read_only(path: Path) -> None:
    tensor = torch.arange(6.0)
    tssd.save_file({"t": tensor, "n": tensor.numpy()}, path)
    loaded = tssd.load_file(path)
    assert not loaded["n"].flags.writeable
    loaded["t"][0] = 5
    assert loaded["n"][0] == 5


def test_ten_thousand_tensors_roundtrip(path: Path) -> None:
    state = {"a": [{"b": torch.tensor(float(i)), "i": i} for i in range(10_000)]}
    tssd.save_file(state, path, fsync=False)
    loaded = tssd.load_file(path)["a"]
    assert [each["b"].item() for each in loaded] == [float(i) for i in range(10_000)]


def test_shard_roundtrips(path: Path) -> None:
    tensor_slice = tssd.TensorSlice((2, 0), (1,), (4, 3), (2, 3), (2,))
    local = nn.Parameter(torch.randn(2, 3))
    tssd.save_file({"w": tssd.TensorShard(local, tensor_slice)}, path)
    loaded = tssd.load_file(path)["w"]
    assert loaded.tensor_slice == tensor_slice and same(loaded.local, local)
    import pickle

    unpickled = pickle.loads(pickle.dumps(loaded))
    assert unpickled.tensor_slice == tensor_slice and same(unpickled.local, local)


def test_command_is_installed() -> None:
    command = Path(sys.executable).with_name("tssd")
    if not command.exists():
        pytest.skip("the package was not installed from a wheel")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tssd", tssd.__version__]


def test_write_in_forked_child_is_private(path: Path) -> None:
    tssd.save_file({"a": torch.arange(100_000)}, path)
    loaded = tssd.load_file(path)
    child = os.fork()
    if child == 0:
        # The threads of torch do not exist in the child.
        loaded["a"][0] = 1
        os._exit(0 if loaded["a"][0] == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert loaded["a"][0] == 0


def test_array_and_tensor_that_share_memory_share_it_after_load(path: Path) -> None:
    for dtype in (torch.float32, torch.int64):
        tensor = torch.arange(6).to(dtype).requires_grad_(dtype.is_floating_point)
        tssd.save_file({"t": tensor, "a": tensor.detach().numpy(), "view": tensor.detach()[2:4]}, path)
        got = tssd.load_file(path)
        assert torch.equal(got["t"], tensor) and got["t"].requires_grad == tensor.requires_grad
        assert np.array_equal(got["a"], tensor.detach().numpy()) and not got["a"].flags.writeable
        with torch.no_grad():
            got["t"][2] = 9
        assert got["a"][2] == 9 and got["view"][0] == 9
