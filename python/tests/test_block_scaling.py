"""Block-scaled quantization by rules of a mapping. The oracle quantizes the whole tensor block by block."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import tssd  # noqa: E402
from tssd.mapping import Mapping, block_scales, fuse, narrow, quantize, stack, transpose  # noqa: E402

FP8 = torch.float8_e4m3fn
RULES = Mapping(
    {
        "{p:path}.weight": quantize("{p}.weight", block=(4, 8)),
        "{p:path}.weight_scale_inv": block_scales("{p}.weight", block=(4, 8)),
    }
)


def expected(tensor: Any, block: tuple[int, int]) -> tuple[Any, Any]:
    """Returns the quantized elements and the scales, computed one block at a time."""
    rows, columns = tensor.shape[-2:]
    height, width = block
    elements = torch.empty(tensor.shape, dtype=FP8)
    scales = torch.empty(*tensor.shape[:-2], -(-rows // height), -(-columns // width))
    for row in range(scales.shape[-2]):
        for column in range(scales.shape[-1]):
            part = (..., slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width))
            largest = tensor[part].float().abs().amax((-1, -2))
            scale = torch.where(largest == 0, 1.0, largest / 448)
            scales[..., row, column] = scale
            elements[part] = (tensor[part].float() / scale[..., None, None]).clamp(-448, 448).to(FP8)
    return elements, scales


def bits(tensor: Any) -> list[int]:
    result: list[int] = tensor.contiguous().view(torch.uint8).flatten().tolist()
    return result


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tssd.Store:
    return tssd.Store("memory:" if request.param == "memory" else str(tmp_path / "store"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_whole_tensors_equal_those_of_the_oracle(store: tssd.Store, dtype: Any) -> None:
    weights = {
        "a": torch.randn(16, 32),
        "b": torch.randn(13, 21),
        "c": torch.zeros(4, 8),
        "d": torch.randn(1, 3) * 1e-4,
    }
    weights["b"][4:8, 8:16] = 0
    stored = {f"{name}.weight": weight.to(dtype) for name, weight in weights.items()}
    store.put_state_dict(stored, "x")
    into = {}
    for name, weight in weights.items():
        elements, scales = expected(weight.to(dtype), (4, 8))
        into[f"{name}.weight"] = torch.empty(weight.shape, dtype=FP8)
        into[f"{name}.weight_scale_inv"] = torch.empty_like(scales)
    _, report = store.get_state_dict("x", into=into, mapping=RULES, return_report=True)
    for name, tensor in stored.items():
        elements, scales = expected(tensor, (4, 8))
        assert torch.equal(into[f"{name}_scale_inv"], scales)
        assert bits(into[name]) == bits(elements)
        back = (
            into[name].float()
            * scales.repeat_interleave(4, 0).repeat_interleave(8, 1)[: elements.shape[0], : elements.shape[1]]
        )
        # Three bits of a fraction, and subnormal numbers of 2^-9.
        assert torch.all((back - tensor.float()).abs() <= tensor.float().abs() / 16 + scales.max() * 2**-10)
    # Elements and scales are computed from the whole tensor each.
    assert report.bytes_staged == report.bytes_needed == 2 * sum(tensor.nbytes for tensor in stored.values())
    assert report.cast == [] and report.missing_keys == []


@pytest.mark.parametrize("staged", [False, True])
def test_each_shard_has_the_elements_of_the_whole(store: tssd.Store, staged: bool) -> None:
    """A shard that cuts blocks reads them whole, and nothing else."""
    generator = random.Random(staged)
    weight = torch.randn(3, 22, 45).bfloat16()
    store.put_state_dict({"e.weight": weight}, "x")
    elements, scales = expected(weight, (4, 8))
    for _ in range(40):
        boxes = []
        for whole in (elements, scales):
            starts = [generator.randrange(size) for size in whole.shape]
            boxes.append((starts, [generator.randint(0, size - start) for size, start in zip(whole.shape, starts)]))
        into, needed = {}, 0
        for name, whole, (starts, sizes), block in [
            ("e.weight", elements, boxes[0], (1, 4, 8)),
            ("e.weight_scale_inv", scales, boxes[1], (1, 1, 1)),
        ]:
            local = torch.empty(sizes, dtype=whole.dtype)
            into[name] = tssd.TensorShard(local, tssd.TensorSlice(starts, None, list(whole.shape), sizes, None))
            unit = (1, 1, 1) if name == "e.weight" else (1, 4, 8)
            count = 1
            for start, size, step, scale, limit in zip(starts, sizes, block, unit, weight.shape):
                count *= (
                    min(-(-(start + size) // step) * step * scale, limit) - start // step * step * scale if size else 0
                )
            needed += count * 2
        if staged:
            with store.stage("x", into, mapping=RULES) as version:
                version.commit()
                version.commit()
                report = version.report
        else:
            _, report = store.get_state_dict("x", into=into, mapping=RULES, return_report=True)
            assert report.bytes_staged == needed
        assert report.bytes_needed == needed
        for name, whole, (starts, sizes) in [
            ("e.weight", elements, boxes[0]),
            ("e.weight_scale_inv", scales, boxes[1]),
        ]:
            part = whole[tuple(slice(start, start + size) for start, size in zip(starts, sizes))]
            assert bits(into[name].local) == bits(part)


def test_value_of_an_expression_is_quantized(store: tssd.Store) -> None:
    weights = {f"experts.{number}.w": torch.randn(8, 16) for number in range(3)}
    store.put_state_dict(weights, "x")
    rules: dict[str, tuple[Any, Any]] = {
        "fused": (fuse("experts.0.w", "experts.1.w"), torch.cat([weights["experts.0.w"], weights["experts.1.w"]])),
        "stacked": (stack("experts.{e}.w", over="e"), torch.stack(list(weights.values()))),
        "transposed": (transpose("experts.2.w", 0, 1), weights["experts.2.w"].T),
        "part": (narrow("experts.2.w", 0, 2, 5), weights["experts.2.w"][2:7]),
    }
    for name, (rule, whole) in rules.items():
        elements, scales = expected(whole, (4, 8))
        into = {"q": torch.empty(whole.shape, dtype=FP8), "s": torch.empty_like(scales)}
        mapping = Mapping({"q": quantize(rule, (4, 8)), "s": block_scales(rule, block=(4, 8))})
        store.get_state_dict("x", into=into, mapping=mapping, strict=False)
        assert bits(into["q"]) == bits(elements), name
        assert torch.equal(into["s"], scales), name


def test_default_block_has_128_rows_and_columns(store: tssd.Store) -> None:
    weight = torch.randn(256, 200)
    store.put_state_dict({"w": weight}, "x")
    into = {"w": torch.empty(256, 200, dtype=FP8), "s": torch.empty(2, 2)}
    store.get_state_dict("x", into=into, mapping=Mapping({"w": quantize("w"), "s": block_scales("w")}))
    elements, scales = expected(weight, (128, 128))
    assert bits(into["w"]) == bits(elements) and torch.equal(into["s"], scales)


def test_invalid_uses_are_refused(store: tssd.Store) -> None:
    store.put_state_dict({"w": torch.randn(8, 8), "v": torch.randn(8), "i": torch.ones(8, 8, dtype=torch.int32)}, "x")
    cases: list[tuple[str, Any, type[Exception], str]] = [
        ("w", torch.empty(8, 8), TypeError, "`w` is float32, its rule computes float8_e4m3fn"),
        ("w", torch.empty(8, 7, dtype=FP8), ValueError, r"it has shape \[8, 7\], its stored parts \[8, 8\]"),
        ("v", torch.empty(8, dtype=FP8), ValueError, r"a tensor of shape \[8\] has no blocks"),
        ("i", torch.empty(8, 8, dtype=FP8), TypeError, "`i` cannot be computed from int32"),
    ]
    for name, into, error, text in cases:
        with pytest.raises(error, match=text):
            store.get_state_dict("x", into={name: into}, mapping=Mapping({name: quantize(name)}), strict=False)
    into = {"n": torch.empty(8, 8, dtype=FP8)}
    _, report = store.get_state_dict(
        "x", into=into, mapping=Mapping({"n": quantize("n")}), strict=False, return_report=True
    )
    assert report.missing_keys == ["n"]
    with pytest.raises(ValueError, match="a rule that quantizes cannot put"):
        store.put_state_dict({"w": torch.empty(8, 8, dtype=FP8)}, "y", mapping=Mapping({"w": quantize("w")}))
    with pytest.raises(ValueError, match="are the outermost part of a rule"):
        Mapping({"w": fuse(quantize("a"), "b")})
    with pytest.raises(ValueError, match="a block has two sizes"):
        quantize("w", block=(0, 128))
