"""Mappings from the tensors of modules to those of checkpoints, by the conversions that transformers applies."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._errors import TssdError, new_exception
from ..mapping import Expression, Mapping, fuse, narrow, shard, stack, transpose

_Shape = tuple[int, ...]


def mapping_of(model: Any) -> Mapping:
    """Returns the checkpoint tensors that the tensors of a model consist of, for `Store.put_state_dict`.

    transformers 5 fuses and stacks tensors while it loads a checkpoint, such as the experts of a layer. A put with this
    mapping stores the names and layouts that `save_pretrained` writes, and that engines expect. Tensors that are the
    same in both have no rule.

    Args:
        model: a model of transformers, or its configuration. The tensors can be sharded, or on the "meta" device.

    Raises:
        TssdUnsupportedError: a conversion of this model does more than moving elements. The error names it.
    """
    from transformers import PreTrainedConfig
    from transformers.core_model_loading import ConversionOps, revert_weight_conversion

    if isinstance(model, PreTrainedConfig):
        model = _meta_model(model)
    if not hasattr(model, "base_model_prefix"):
        text = f"{type(model).__name__} is no model of transformers"
        raise new_exception("WrongType", "", text, None, "give the model without its wrappers", None, None)
    traced = {
        name: _Traced(tuple(tensor.shape))
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }
    revert: Any = revert_weight_conversion
    try:
        converted: dict[str, _Traced] = revert(model, dict(traced))
    except _NotTraceable as error:
        frames = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
        operations = [type(owner).__name__ for owner in frames if isinstance(owner, ConversionOps)]
        raise _unsupported(type(model).__name__, operations[-1] if operations else str(error)) from error
    for name, value in converted.items():
        value.name = name
    rules = {}
    for name, value in traced.items():
        if value.name != name:
            rule = value.expression()
            if rule is None:
                raise _unsupported(type(model).__name__, f"a conversion of `{name}`")
            rules[name] = rule
    return Mapping(rules)


def _meta_model(config: Any) -> Any:
    """Returns the model of a configuration, without memory."""
    import transformers

    architectures = getattr(config, "architectures", None) or ()
    cls = next((found for name in architectures if (found := getattr(transformers, name, None)) is not None), None)
    with torch.device("meta"):
        if cls is not None:
            return cls(config)
        try:
            auto: Any = transformers.AutoModelForCausalLM
            return auto.from_config(config)
        except ValueError as error:
            text = f"the class of the model of a {type(config).__name__} is not known"
            raise new_exception("invalid", "", text, None, "give the model", None, None) from error


class _NotTraceable(Exception):
    """An operation other than a move of elements. The message names the function."""


class _Traced:
    """The shape of a tensor that transformers converts, and the conversion."""

    def __init__(self, shape: _Shape) -> None:
        self.shape = shape
        # The name in the checkpoint.
        self.name: str | None = None
        self._use: Callable[[], str | Expression | None] | None = None
        self._squeezed: tuple[int, _Traced] | None = None

    def expression(self) -> str | Expression | None:
        """Returns the stored tensors that this tensor consists of. None: they are not known."""
        return self.name if self._use is None else self._use()

    def _consume(self, use: Callable[[], str | Expression | None]) -> None:
        if self._use is not None or self._squeezed is not None:
            raise _NotTraceable("a tensor is used twice")
        self._use = use

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def contiguous(self) -> _Traced:
        return self

    def squeeze(self, dim: int) -> _Traced:
        dim %= len(self.shape)
        if self.shape[dim] != 1 or self._use is not None:
            raise _NotTraceable("squeeze")
        child = _Traced(self.shape[:dim] + self.shape[dim + 1 :])
        self._squeezed = dim, child
        return child

    def transpose(self, dim0: int, dim1: int) -> _Traced:
        shape = list(self.shape)
        shape[dim0], shape[dim1] = shape[dim1], shape[dim0]
        child = _Traced(tuple(shape))

        def use() -> Expression | None:
            inner = child.expression()
            return None if inner is None else transpose(inner, dim0, dim1)

        self._consume(use)
        return child

    def split(self, sizes: Sequence[int], dim: int = 0) -> tuple[_Traced, ...]:
        dim %= len(self.shape)
        children = tuple(_Traced((*self.shape[:dim], size, *self.shape[dim + 1 :])) for size in sizes)

        def use() -> str | Expression | None:
            squeezed = [child._squeezed for child in children]
            if all(each is not None and each[0] == dim for each in squeezed):
                inner = _all(each[1].expression() for each in squeezed if each is not None)
                return None if inner is None else stack(*inner, dim=dim)
            inner = _all(child.expression() for child in children if child._squeezed is None)
            if inner is None or len(inner) != len(children):
                return None
            return fuse(*inner, dim=dim, sizes=None if len(set(sizes)) == 1 else sizes)

        self._consume(use)
        return children

    def chunk(self, chunks: int, dim: int = 0) -> tuple[_Traced, ...]:
        length = self.shape[dim]
        size = -(-length // chunks)
        return self.split([min(size, length - start) for start in range(0, length, size)], dim)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        traced: Any = _FUNCTIONS.get(function)
        if traced is None:
            raise _NotTraceable(getattr(function, "__name__", str(function)))
        return traced(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _NotTraceable(name)


def _concatenate(tensors: Sequence[_Traced], dim: int = 0) -> _Traced:
    """Traces `torch.cat`: each tensor is then a part of a stored one."""
    first = tensors[0].shape
    dim %= len(first)
    sizes = [tensor.shape[dim] for tensor in tensors]
    result = _Traced((*first[:dim], sum(sizes), *first[dim + 1 :]))
    start = 0
    for index, (tensor, size) in enumerate(zip(tensors, sizes)):

        def use(index: int = index, start: int = start, size: int = size) -> Expression | None:
            whole = result.expression()
            if whole is None:
                return None
            # A put can infer the stored size from one of equal shards only.
            if len(set(sizes)) == 1:
                return shard(whole, dim, index, len(sizes))
            return narrow(whole, dim, start, size)

        tensor._consume(use)
        start += size
    return result


_FUNCTIONS = {
    torch.chunk: _Traced.chunk,
    torch.split: _Traced.split,
    torch.cat: _concatenate,
    torch.transpose: _Traced.transpose,
}


def _all(expressions: Any) -> list[str | Expression] | None:
    found = list(expressions)
    return None if None in found else found


def _unsupported(model: str, operation: str) -> TssdError:
    text = f"the tensors of {model} are no parts of those of its checkpoints: transformers converts them by {operation}"
    advice = "put them as they are, or write a tssd.mapping.Mapping"
    return new_exception("unsupported", "", text, None, advice, None, None)
