"""torch's tensors: what is kept of them, and whose memory they are."""

from __future__ import annotations

import gc
import os
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
from same import bits, same
from torch import nn

pytestmark = [
    pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions"),
]

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def made(dtype: torch.dtype, shape: tuple[int, ...] = (3, 4)) -> torch.Tensor:
    """A tensor of any dtype, with all kinds of bits."""
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
def test_every_dtype(path: Path, dtype: torch.dtype) -> None:
    if dtype in QUANTIZED:
        with pytest.raises(TypeError, match="quantized") as caught:
            tssd.save({"a": {"b": made(dtype)}})
        assert caught.value.fqn == "a.b"  # type: ignore[attr-defined]
        return
    state = {"a": made(dtype), "turned": made(dtype, (2, 3, 4)).permute(2, 0, 1), "dtype": dtype}
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
        assert part.dtype is dtype and bits(part) == bits(made(dtype).as_strided((2, 2), (4, 2), 4))


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_what_a_tensor_is_comes_back(path: Path, backend: str) -> None:
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


def test_views_that_are_computed_are_materialized() -> None:
    x = torch.randn(4, 5, dtype=torch.complex64)
    state = {"conj": x.conj(), "neg": x.conj().imag, "zero": torch._efficientzerotensor(3)}
    assert state["conj"].is_conj() and state["neg"].is_neg()
    loaded = tssd.load(tssd.save(state))
    assert not loaded["conj"].is_conj() and not loaded["neg"].is_neg()
    for key, wanted in state.items():
        assert torch.equal(loaded[key], wanted.clone())


def test_tied_tensors_are_stored_once_and_come_back_tied(path: Path) -> None:
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


def test_a_view_is_stored_without_the_rest_of_its_storage(path: Path) -> None:
    tssd.save_file({"a": torch.randn(10_000_000)[5:10]}, path)
    assert path.stat().st_size < 8192
    assert tssd.load_file(path)["a"].untyped_storage().nbytes() == 20


def test_state_dicts_of_modules_and_optimizers(path: Path) -> None:
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


def test_metadata_of_a_module_that_is_no_json() -> None:
    state = nn.Linear(1, 1).state_dict()
    state._metadata[""]["x"] = object()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="_metadata") as caught:
        tssd.save({"model": state})
    assert caught.value.fqn == "model"  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [{}, {"backend": "pread"}, {"verify": "off"}, {"verify": "lazy"}])
def test_a_write_changes_the_caller_s_memory_alone(path: Path, options: dict[str, Any]) -> None:
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


def test_a_write_into_a_tensor_of_safe_open_changes_no_other(path: Path) -> None:
    state = {"big": torch.randn(1000, 1000), "small": torch.arange(10)}
    tssd.save_file(state, path)
    with tssd.safe_open(path, "pt") as file:
        for key in state:
            file.get_tensor(key).zero_()
            file.get_slice(key)[1:].zero_()
            assert same(file.get_tensor(key), state[key])


def test_a_write_into_what_bytes_or_a_blob_gave(path: Path) -> None:
    state = {"a": torch.randn(1000)}
    data = tssd.save(state)
    copy = bytes(bytearray(data))
    tssd.load(data)["a"].zero_()
    assert data == copy
    encoded = tssd.TorchStoreStateDict.from_state_dict(state)
    encoded.to_state_dict()["a"].zero_()
    assert same(encoded.to_state_dict(), state)


def maps(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_the_map_ends_with_the_last_tensor(path: Path) -> None:
    state = {"a": torch.randn(100_000), "b": torch.randn(100_000), "c": 1}
    tssd.save_file(state, path)
    loaded = tssd.load_file(path)
    view = loaded["b"][5:10]
    array = loaded["b"].numpy()
    storage = loaded["a"].untyped_storage()
    del loaded
    gc.collect()
    assert maps(path) == 1
    assert torch.equal(view, state["b"][5:10]) and array[0] == state["b"][0]
    del view, array
    gc.collect()
    assert maps(path) == 1 and len(storage) == 400_000
    del storage
    gc.collect()
    assert maps(path) == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_memory_of_a_tensor_goes_with_it(path: Path, backend: str) -> None:
    def anonymous() -> int:
        text = Path("/proc/self/smaps_rollup").read_text()
        return int(text.split("Anonymous:")[1].split()[0]) * 1024

    size = 64 << 20
    state = {"a": torch.ones(size, dtype=torch.uint8), "b": torch.ones(1000, dtype=torch.uint8)}
    tssd.save_file(state, path, fsync=False)
    del state
    loaded = tssd.load_file(path, backend=backend)
    loaded["a"].add_(1)
    full = anonymous()
    del loaded["a"]
    assert full - anonymous() > size // 2
    assert loaded["b"].sum() == 1000


class Subclass(torch.Tensor):
    pass


def bad_tensors() -> dict[str, Any]:
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
def test_tensors_that_cannot_be_stored(name: str) -> None:
    with pytest.raises(TypeError) as caught:
        tssd.save({"a": [bad_tensors()[name]]})
    error = caught.value
    assert isinstance(error, tssd.TssdError)
    assert error.fqn == "a.0" and error.advice
    assert name.partition("_")[0].lower() in str(error).lower() or name == "jagged"


def test_cloudpickle_pickles_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    objects = []

    def dumps(thing: object) -> bytes:
        objects.append(thing)
        return pickle.dumps(("by it", thing))

    for module in (SimpleNamespace(dumps=dumps), None):
        monkeypatch.setitem(sys.modules, "cloudpickle", module)
        data = tssd.save({"a": {1}}, allow_pickle=True)
        got = tssd.load(data, allow_pickle=True)["a"]
        assert got == (("by it", {1}) if module else {1})
    assert objects == [{1}]


def test_subclasses_are_refused_though_pickle_is_allowed() -> None:
    with pytest.raises(TypeError, match="Subclass"):
        tssd.save({"a": torch.ones(3).as_subclass(Subclass)}, allow_pickle=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_quantized_weights_of_torchao_are_refused_and_what_they_are_made_of_is_not(config: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 32, bias=False)).to(torch.bfloat16)
    quantization.quantize_(model, getattr(quantization, config)())
    weight = model.state_dict()["0.weight"]
    with pytest.raises(tssd.TssdTypeError) as caught:
        tssd.save({"model": model.state_dict()})
    error = caught.value
    assert error.fqn == "model.0.weight" and f"{type(weight).__module__}.{type(weight).__qualname__}" in str(error)
    # The advice can be taken.
    assert error.advice is not None and "__tensor_flatten__" in error.advice and "dequantize()" in error.advice
    names, _ = weight.__tensor_flatten__()
    parts = {name: getattr(weight, name) for name in names}
    loaded = tssd.load(tssd.save({"parts": parts, "whole": weight.dequantize()}))
    assert same(loaded["whole"], weight.dequantize()) and len(parts) >= 2
    assert all(same(loaded["parts"][name], part) for name, part in parts.items())


def test_an_asynchronous_collective_s_tensor_is_waited_for() -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    tensor = AsyncCollectiveTensor(torch.arange(3.0))
    loaded = tssd.load(tssd.save({"a": tensor}))
    assert type(loaded["a"]) is torch.Tensor and torch.equal(loaded["a"], torch.arange(3.0))


def test_other_devices(path: Path) -> None:
    state = {"a": torch.randn(3, 4).t(), "b": torch.ones(2, dtype=torch.bfloat16), "n": np.arange(3)}
    tssd.save_file(state, path)
    loaded = tssd.load_file(path, device="meta")
    assert loaded["a"].device.type == "meta" and loaded["a"].stride() == (1, 4)
    assert same(loaded["n"], state["n"])
    with tssd.safe_open(path, "pt", device="meta") as file:
        assert file.get_tensor("a").device.type == "meta"
        assert file.get_slice("a")[1:].shape == (3, 3)
    with pytest.raises(RuntimeError):
        tssd.load_file(path, device="no such device")


def test_slices_are_those_of_torch(path: Path) -> None:
    tensor = torch.randn(100, 50, 4).transpose(0, 2)
    tssd.save_file({"a": tensor}, path)
    with tssd.safe_open(path, "pt") as file:
        part = file.get_slice("a")
        assert part.get_shape() == [4, 50, 100]
        for index in np.s_[1, -1, 1:3, ..., :, (1, 2, 3), (..., 5), (slice(0, 4, 2), slice(10, 50, 7)), 4:]:
            assert torch.equal(part[index], tensor[index])
        with pytest.raises(ValueError):
            part[::-1]
        with pytest.raises(TypeError):
            part[torch.tensor([1])]


def test_arrays_for_who_wants_them(path: Path) -> None:
    state = {"a": torch.arange(6.0).reshape(2, 3).t(), "p": nn.Parameter(torch.ones(2))}
    tssd.save_file(state, path)
    loaded = tssd.load_file(path, framework="numpy")
    assert isinstance(loaded["a"], np.ndarray) and loaded["a"].strides == (4, 12)
    np.testing.assert_array_equal(loaded["a"], state["a"].numpy())


def test_arrays_of_a_loaded_torch_file_are_read_only(path: Path) -> None:
    tensor = torch.arange(6.0)
    tssd.save_file({"t": tensor, "n": tensor.numpy()}, path)
    loaded = tssd.load_file(path)
    assert not loaded["n"].flags.writeable
    loaded["t"][0] = 5
    assert loaded["n"][0] == 5


def test_ten_thousand_tensors(path: Path) -> None:
    state = {"a": [{"b": torch.tensor(float(i)), "i": i} for i in range(10_000)]}
    tssd.save_file(state, path, fsync=False)
    loaded = tssd.load_file(path)["a"]
    assert [each["b"].item() for each in loaded] == [float(i) for i in range(10_000)]


def test_shards_in_files(path: Path) -> None:
    place = tssd.TensorSlice((2, 0), (1,), (4, 3), (2, 3), (2,))
    local = nn.Parameter(torch.randn(2, 3))
    tssd.save_file({"w": tssd.TensorShard(local, place)}, path)
    loaded = tssd.load_file(path)["w"]
    assert loaded.tensor_slice == place and same(loaded.local, local)
    import pickle

    again = pickle.loads(pickle.dumps(loaded))
    assert again.tensor_slice == place and same(again.local, local)


def test_the_command_is_there() -> None:
    command = Path(sys.executable).with_name("tssd")
    if not command.exists():
        pytest.skip("the package was not installed from a wheel")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tssd", tssd.__version__]


def test_a_fork_of_torch(path: Path) -> None:
    tssd.save_file({"a": torch.arange(100_000)}, path)
    loaded = tssd.load_file(path)
    child = os.fork()
    if child == 0:
        # torch's own threads do not survive a fork.
        loaded["a"][0] = 1
        os._exit(0 if loaded["a"][0] == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert loaded["a"][0] == 0


def test_an_array_and_a_tensor_of_one_memory_come_back_so(path: Path) -> None:
    for dtype in (torch.float32, torch.int64):
        tensor = torch.arange(6).to(dtype).requires_grad_(dtype.is_floating_point)
        tssd.save_file({"t": tensor, "a": tensor.detach().numpy(), "view": tensor.detach()[2:4]}, path)
        got = tssd.load_file(path)
        assert torch.equal(got["t"], tensor) and got["t"].requires_grad == tensor.requires_grad
        assert np.array_equal(got["a"], tensor.detach().numpy()) and not got["a"].flags.writeable
        with torch.no_grad():
            got["t"][2] = 9
        assert got["a"][2] == 9 and got["view"][0] == 9
