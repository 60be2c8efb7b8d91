"""Installation of a version in a vLLM model: staged while the model serves, committed in a pause."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import (
    _layerwise_process,
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
    initialize_online_processing,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors

import tssd

from ._recording import Copy, Recording, TensorSpec, is_in_place, record

_ALREADY_PROCESSED = "_already_called_process_weights_after_loading"


def read_specs(version: tssd.OpenVersion) -> dict[str, TensorSpec]:
    """Returns the dtypes and the shapes of the tensors of a version."""
    specs = {}
    for name in version.keys():
        handle = version.get_slice(name)
        specs[name] = TensorSpec(getattr(torch, handle.get_dtype()), tuple(handle.get_shape()))
    return specs


def target(copy: Copy, tensor: torch.Tensor) -> tuple[str, tssd.TensorShard[Any]]:
    """Returns the target of a copy in a tensor of its module."""
    start = tensor.storage_offset() + copy.start
    local = tensor.detach().as_strided(copy.box.sizes, copy.box.strides, start)
    part = tssd.TensorSlice(list(copy.box.offsets), None, list(copy.shape), list(copy.box.sizes), None)
    return copy.name, tssd.TensorShard(local, part)


@dataclass
class Staged:
    """A version whose bytes are on this host, for one model."""

    version: tssd.OpenVersion
    # Parameters that the commit writes.
    in_place: tssd.StagedVersion | None
    # Tensors of modules that post-process them, in the layout of the checkpoint.
    before_processing: dict[torch.nn.Module, dict[str, torch.Tensor]]
    # Checkpoint tensors that the model loads itself.
    whole: list[tuple[str, torch.Tensor]]
    bytes_needed: int
    bytes_received: int
    stage_seconds: float

    def close(self) -> None:
        if self.in_place is not None:
            self.in_place.close()
        self.version.close()


@dataclass
class Installer:
    """Installs versions of one key in one model.

    The model takes exactly its shards. What it takes is recorded once for each layout of the versions.
    """

    model: torch.nn.Module
    model_config: Any
    device: torch.device
    _specs: dict[str, TensorSpec] = field(default_factory=dict)
    _recording: Recording = field(default_factory=Recording)
    # Modules whose post-processing leaves its input as it is.
    _readers: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)

    def prepare(self, version: tssd.OpenVersion) -> None:
        """Records what the model takes from a version, unless that is known. The model must not run meanwhile."""
        specs = read_specs(version)
        if specs == self._specs:
            return
        recording = record(self.model, self.device, specs)
        self._check_coverage(recording)
        self._specs, self._recording = specs, recording

    def _check_coverage(self, recording: Recording) -> None:
        """Checks that each parameter of the model gets at least some elements."""
        if recording.whole_names:
            # Only the model knows which parameters it loads from these.
            return
        filled = {(id(copy.module), copy.tensor_name) for copy in recording.copies}
        filled_parameters = {id(getattr(copy.module, copy.tensor_name)) for copy in recording.copies}
        names = []
        for prefix, module in self.model.named_modules():
            # After post-processing, a module may have no parameter any more.
            before, _ = get_layerwise_info(module).restore_metadata
            # A bias is not in the metadata. Post-processing may add other parameters.
            names_of_module = before.keys() | ({"bias"} if getattr(module, "bias", None) is not None else set())
            for name in names_of_module:
                tensor = getattr(module, name, None)
                if not isinstance(tensor, torch.Tensor):
                    continue
                is_tied = id(tensor) in filled_parameters
                if (id(module), name) not in filled and not is_tied and name not in SKIP_LOAD_TENSORS:
                    names.append(f"{prefix}.{name}")
        if names:
            shown = ", ".join(f"`{name}`" for name in sorted(names)[:10])
            more = f" and {len(names) - 10} more" if len(names) > 10 else ""
            raise ValueError(f"the version has nothing for the parameters {shown}{more} of the model")

    def stage(self, store: tssd.Store, version: tssd.OpenVersion, timeout: float) -> Staged:
        """Brings exactly the bytes that the model needs to this host, verified. The model may run meanwhile."""
        started = time.monotonic()
        in_place, buffered = [], []
        before_processing: dict[torch.nn.Module, dict[str, torch.Tensor]] = {}
        for copy in self._recording.copies:
            if is_in_place(copy.module, copy.tensor_name):
                in_place.append(target(copy, getattr(copy.module, copy.tensor_name)))
                continue
            tensors = before_processing.setdefault(copy.module, {})
            if copy.tensor_name not in tensors:
                tensors[copy.tensor_name] = self._allocate(copy.module, copy.tensor_name)
            buffered.append(target(copy, tensors[copy.tensor_name]))
        needed = received = 0
        if buffered:
            _, report = store.get_state_dict(
                version.key,
                tssd.Targets(buffered),
                version=version,
                strict=False,
                cast=True,
                return_report=True,
                timeout=timeout,
            )
            needed, received = report.bytes_needed, report.bytes_received
        whole: list[tuple[str, torch.Tensor]] = []
        if self._recording.whole_names:
            for name in self._recording.whole_names:
                spec = self._specs[name]
                whole.append((name, torch.empty(spec.shape, dtype=spec.dtype, device="cpu")))
            _, report = store.get_state_dict(
                version.key, tssd.Targets(whole), version=version, strict=False, return_report=True, timeout=timeout
            )
            needed, received = needed + report.bytes_needed, received + report.bytes_received
        # The last step that can fail: what it stages is released with the result.
        staged = None
        if in_place:
            staged = store.stage(
                version.key, tssd.Targets(in_place), version=version, strict=False, cast=True, timeout=timeout
            )
            needed, received = needed + staged.report.bytes_needed, received + staged.report.bytes_received
        seconds = time.monotonic() - started
        return Staged(version, staged, before_processing, whole, needed, received, seconds)

    def _allocate(self, module: torch.nn.Module, tensor_name: str) -> torch.Tensor:
        """Allocates a tensor of a module in the layout before post-processing, in the memory of the host.

        Elements that no checkpoint tensor has, such as the padding of a vocabulary, are zero.
        """
        parameters, buffers = get_layerwise_info(module).restore_metadata
        meta = parameters.get(tensor_name, buffers.get(tensor_name))
        assert meta is not None, f"{tensor_name} was recorded"
        pin = self.device.type == "cuda"
        flat = torch.zeros(_span(meta), dtype=meta.dtype, device="cpu", pin_memory=pin)
        return flat.as_strided(meta.shape, meta.stride())

    @torch.no_grad()
    def commit(self, staged: Staged) -> float:
        """Installs a staged version, from the memory of this host. It can be repeated. The model must not run.

        Returns the time of the engine's own post-processing, in seconds.
        """
        if staged.in_place is not None:
            staged.in_place.commit()
        seconds = 0.0
        for module, tensors in staged.before_processing.items():
            seconds += self._process(module, tensors)
        copied = time.monotonic()
        if staged.whole:
            self._load_whole(staged.whole)
        else:
            self._process_tied(set(staged.before_processing))
            self._process_attention()
        return seconds + time.monotonic() - copied

    def _process(self, module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> float:
        """Runs the post-processing of a module on new tensors, and copies the result to the memory that kernels use.

        Returns the time of the post-processing, in seconds.
        """
        info = get_layerwise_info(module)
        kernel_tensors = get_layer_tensors(module)
        info.kernel_tensors = get_layer_params_buffers(module)
        info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
        restore_layer_on_meta(module, info)
        initialize_online_processing(module)
        inputs = []
        for name, meta in get_layer_tensors(module).items():
            if not meta.is_meta:
                continue
            source = tensors.get(name)
            if source is None:
                # No checkpoint tensor fills it.
                source = kernel_tensors[name]
            # Post-processing may change a tensor, and a commit can be repeated.
            tensor = source.detach().to(self.device, copy=module not in self._readers)
            inputs.append((tensor.detach(), source))
            tensor.__class__ = meta.__class__
            tensor.__dict__ = meta.__dict__.copy()
            setattr(module, name, tensor)
        method: Any = getattr(module, "quant_method", None)
        if self.device.type == "cpu" and getattr(method, "moe_kernel", None) is not None:
            # The kernel packs the experts only when it is made. No graph holds the old one.
            method.moe_kernel = None
        started = time.monotonic()
        try:
            with torch.device(self.device):
                _layerwise_process(module, info)
        except BaseException:
            _place_kernel_tensors(module, info)
            info.reset()
            raise
        seconds = time.monotonic() - started
        if module not in self._readers and self.device.type == "cpu":
            if all(torch.equal(tensor, source) for tensor, source in inputs):
                self._readers.add(module)
        return seconds

    def _process_tied(self, updated: set[torch.nn.Module]) -> None:
        """Repeats the post-processing of modules that share a parameter with an updated module."""
        shared = {id(parameter) for module in updated for parameter in module.parameters(recurse=False)}
        for module in self.model.modules():
            method = getattr(module, "quant_method", None)
            if module in updated or not isinstance(method, QuantizeMethodBase):
                continue
            if any(id(parameter) in shared for parameter in module.parameters(recurse=False)):
                if hasattr(module, _ALREADY_PROCESSED):
                    delattr(module, _ALREADY_PROCESSED)
                method.process_weights_after_loading(module)

    def _process_attention(self) -> None:
        """Repeats the post-processing of attention layers, which derive tensors from those of other modules."""
        for module in self.model.modules():
            if is_deferred_attention_layer(module):
                module.process_weights_after_loading(self.model_config.dtype)  # type: ignore[operator]

    def _load_whole(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Loads checkpoint tensors through the model, layer by layer.

        If it fails, the layers that are not complete have their parameters of before again.
        """
        last = "?"

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal last
            for name, tensor in weights:
                last = name
                yield name, tensor

        try:
            with torch.device(self.device):
                initialize_layerwise_reload(self.model)
                self.model.load_weights(tensors())  # type: ignore[operator]
                finalize_layerwise_reload(self.model, self.model_config)
        except Exception as error:
            self._restore_layers()
            raise ValueError(f"the model cannot load `{last}`: {error}") from error
        # The first module of a tied parameter is the one that has loaded it.
        owners: dict[int, torch.nn.Module] = {}
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), module)
        self._process_tied(set(owners.values()))

    def _restore_layers(self) -> None:
        """Gives the layers whose reload has not ended the parameters that their kernels use."""
        for module in self.model.modules():
            info = get_layerwise_info(module)
            if info.kernel_tensors is not None:
                _place_kernel_tensors(module, info)
                info.reset()
        # `initialize_layerwise_reload` has cleared it.
        if hasattr(self.model, "_original_do_torchao_reload"):
            self.model._do_torchao_reload = self.model._original_do_torchao_reload

    def load(self, store: tssd.Store, version: tssd.OpenVersion) -> None:
        """Fills a model that is not post-processed yet."""
        specs = read_specs(version)
        if any(parameter.is_meta for parameter in self.model.parameters()):
            # The tensors are quantised as they are loaded.
            recording = Recording(whole_names=list(specs))
        else:
            recording = record(self.model, self.device, specs)
            self._check_coverage(recording)
        targets = [target(copy, getattr(copy.module, copy.tensor_name)) for copy in recording.copies]
        if targets:
            store.get_state_dict(version.key, tssd.Targets(targets), version=version, strict=False, cast=True)
        if recording.whole_names:
            self.model.load_weights(whole_tensors(version, recording.whole_names))  # type: ignore[operator]


def whole_tensors(version: tssd.OpenVersion, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterates over whole tensors of a version, each read when it is reached."""
    for name in names:
        yield name, version.get_tensor(name)


def _span(tensor: torch.Tensor) -> int:
    """Returns how many elements of memory a tensor needs."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
