"""What a vLLM model takes from which checkpoint tensors, as vLLM's own recorder observes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.weight_transfer.sharded_rdt_engine import ShardedRDTWeightTransferEngine
from vllm.distributed.weight_transfer.sharded_rdt_fake import BakeSink, FakeRDTTensor
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from ._boxes import Box, View, split


class TensorSpec(NamedTuple):
    """The dtype and the shape of a checkpoint tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Copy(NamedTuple):
    """A box of a checkpoint tensor, and its place in a tensor of a module, in the layout before post-processing."""

    name: str
    shape: tuple[int, ...]
    box: Box
    module: torch.nn.Module
    tensor_name: str
    # The place of the box in the memory of the tensor, in elements, without its storage offset.
    start: int


@dataclass
class Recording:
    """The copies of a model. If its loading could not be recorded, the names of all checkpoint tensors."""

    copies: list[Copy] = field(default_factory=list)
    # These are loaded whole, by the model's `load_weights`.
    whole_names: list[str] = field(default_factory=list)


class _TransformDetector(TorchDispatchMode):
    """Notices whether a loader changes a parameter otherwise than by a recorded copy.

    Zeros for padding do not count.
    """

    def __init__(self, sink: BakeSink) -> None:
        super().__init__()
        self.sink = sink
        self.is_recording = False
        self.has_found = False
        accept = sink.accept_copy

        def accept_copy(destination: torch.Tensor, source: Any) -> torch.Tensor:
            self.is_recording = True
            try:
                result: torch.Tensor = accept(destination, source)
                return result
            finally:
                self.is_recording = False

        sink.accept_copy = accept_copy

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_change = function._schema.is_mutable and function not in _ZEROING
        if is_change and self.sink.current is not None and not self.is_recording:
            self.has_found = True
        return function(*args, **(kwargs or {}))


_ZEROING = {torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}


def record(model: torch.nn.Module, device: torch.device, tensors: Mapping[str, TensorSpec]) -> Recording:
    """Records what the model takes from checkpoint tensors. No bytes move, and the model is as before.

    If a loader computes with a tensor, nothing is known about the rest of its module: all tensors are loaded whole.

    Raises:
        ValueError: the model does not know one of the tensors.
    """
    sink = BakeSink()
    detector = _TransformDetector(sink)
    last = "?"

    def placeholders() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal last
        for name, spec in tensors.items():
            last = name
            yield name, FakeRDTTensor(name, torch.Size(spec.shape), spec.dtype, device, sink=sink)

    try:
        with torch.device(device), torch.no_grad():
            initialize_layerwise_reload(model)
            # Both functions do not use `self`.
            ShardedRDTWeightTransferEngine._install_recording_stamps(None, model, sink)
            load: Any = model.load_weights
            with detector:
                load(placeholders())
    except NotImplementedError:
        return Recording(whole_names=list(tensors))
    except Exception as error:
        shape = list(tensors[last].shape) if last in tensors else "?"
        raise ValueError(f"the model cannot load `{last}` of shape {shape}: {error}") from error
    finally:
        ShardedRDTWeightTransferEngine._restore_after_dry_run(None, model)
    if detector.has_found:
        return Recording(whole_names=list(tensors))
    return _resolve(sink, tensors)


def _resolve(sink: BakeSink, tensors: Mapping[str, TensorSpec]) -> Recording:
    recording = Recording()
    for scatters in sink.copies_by_layer.values():
        for scatter in scatters:
            name = scatter.src[0]
            boxes = _boxes_of(scatter, tensors[name])
            if boxes is None:
                return Recording(whole_names=list(tensors))
            for box in boxes:
                start = scatter.offset + box.start
                copy = Copy(name, tensors[name].shape, box, scatter.layer, scatter.param_name, start)
                recording.copies.append(copy)
    return recording


def _boxes_of(scatter: Any, spec: TensorSpec) -> list[Box] | None:
    """Returns the boxes of a checkpoint tensor that a recorded copy takes. None if they are no boxes."""
    base = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    view = base
    for operation, arguments, keywords in scatter.src[1]:
        view = getattr(view, operation)(*arguments, **dict(keywords))
    if view is not base and view._base is not base:
        return None
    if view.dtype != base.dtype or tuple(view.shape) != tuple(scatter.shape):
        return None
    place = View(tuple(view.shape), int(view.storage_offset()), tuple(view.stride()))
    return split(spec.shape, place, scatter.stride)


def is_in_place(module: torch.nn.Module, tensor_name: str) -> bool:
    """Returns whether a tensor of a loaded module has the layout of the checkpoint, and can be written directly."""
    if tensor_name in SKIP_TENSORS:
        return True
    if not _keeps_layout(module):
        return False
    parameters, buffers = get_layerwise_info(module).restore_metadata
    before = parameters.get(tensor_name, buffers.get(tensor_name))
    live = getattr(module, tensor_name, None)
    return (
        before is not None
        and live is not None
        and not live.is_meta
        and (live.shape, live.stride(), live.dtype) == (before.shape, before.stride(), before.dtype)
    )


def _keeps_layout(module: torch.nn.Module) -> bool:
    """Returns whether post-processing leaves the tensors of a module as they are."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.platforms import current_platform

    method = getattr(module, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return True
    # The kernels of CPUs and XPUs have their own layouts.
    is_plain = type(method).__name__ in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
    return is_plain and current_platform.is_cuda_alike()
