"""Mappings between the tensors of a process and the stored ones: other names, fused and stacked parameters.

    from tssd.mapping import Mapping, fuse, shard

    layer = "model.layers.{n}."
    mapping = Mapping({
        layer + "qkv_proj.weight": fuse(*(layer + f"self_attn.{x}_proj.weight" for x in "qkv")),
        "lm_head.weight": "model.embed_tokens.weight",
    })
    store.get_state_dict("policy", into=engine.state_dict(), mapping=mapping)

A rule has the name of a tensor of the process, and an expression of stored tensors that has its elements. With
`get_state_dict` the store copies the stored parts into the tensor, without a temporary tensor. With `put_state_dict`
the parts of the tensor are stored under their own names. Tensors without a rule have the same name on both sides.

`quantize` and `block_scales` compute. They read from temporary tensors, which the report counts as `bytes_staged`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from collections.abc import Mapping as _Dict
from dataclasses import dataclass, field
from typing import NamedTuple

from . import _block_scaling
from ._block_scaling import Transform
from ._errors import TssdError, new_exception

__all__ = [
    "Expression",
    "Mapping",
    "block_scales",
    "fuse",
    "narrow",
    "quantize",
    "shard",
    "stack",
    "transpose",
]

_Shape = tuple[int, ...]


class _Piece(NamedTuple):
    """A box of a stored tensor, and its place in a tensor of the process.

    Dimension k of the box is dimension `dims[k]` of the tensor. In the other dimensions of the tensor, the piece has
    the size 1. All numbers are in elements.
    """

    stored: str
    stored_shape: _Shape
    stored_offsets: _Shape
    sizes: _Shape
    offsets: _Shape
    dims: _Shape


class _Value(NamedTuple):
    """The value of an expression: a shape, and the pieces that cover it."""

    shape: _Shape
    pieces: list[_Piece]


class _Problem(Exception):
    """A tensor does not fit its rule. `kind` is an error kind."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class _Bindings(NamedTuple):
    """The values of the placeholders of a rule."""

    values: _Dict[str, str]

    def name(self, template: str) -> str:
        """Returns the name for a template. A placeholder without a value stays as it is."""
        return _PLACEHOLDER.sub(lambda match: self.values.get(match[1], match[0]), template)

    def bind(self, placeholder: str, index: int) -> _Bindings:
        return _Bindings({**self.values, placeholder: str(index)})


_PLACEHOLDER = re.compile(r"\{([^\W\d]\w*)(?::(\w+))?\}")
# Regular expressions of placeholders, by their converters.
_CONVERTERS = {None: r"[^.]+", "int": r"[0-9]+", "path": r".+"}


class Expression:
    """Stored tensors, or parts of them, that together are one tensor: see `fuse`, `stack`, `narrow`, `shard`."""

    def _value(self, bindings: _Bindings, stored: _Dict[str, _Shape]) -> _Value:
        """Evaluates the expression, given the shapes of the stored tensors."""
        raise NotImplementedError

    def _infer(self, bindings: _Bindings, shape: _Shape, stored: dict[str, _Shape]) -> None:
        """Adds the shapes of the stored tensors, given the shape of the value."""
        raise NotImplementedError

    def _children(self) -> tuple[Expression, ...]:
        return ()

    def _transform(self, value: _Value) -> Transform | None:
        """Returns what computes the tensor from the value. None: the tensor is the value."""
        return None

    def _placeholders(self) -> set[str]:
        """Returns the placeholders that the rule must bind."""
        return set().union(*(child._placeholders() for child in self._children()))

    def _templates(self) -> list[str]:
        """Returns the names of the stored tensors, with placeholders."""
        return [template for child in self._children() for template in child._templates()]


@dataclass(frozen=True)
class _Stored(Expression):
    """A whole stored tensor."""

    template: str

    def _value(self, bindings: _Bindings, stored: _Dict[str, _Shape]) -> _Value:
        name = bindings.name(self.template)
        shape = stored.get(name)
        if shape is None:
            raise _Problem("NotFound", f"`{name}` is not stored")
        zeros = (0,) * len(shape)
        return _Value(shape, [_Piece(name, shape, zeros, shape, zeros, tuple(range(len(shape))))])

    def _infer(self, bindings: _Bindings, shape: _Shape, stored: dict[str, _Shape]) -> None:
        name = bindings.name(self.template)
        known = stored.setdefault(name, shape)
        if known != shape:
            raise _Problem("SliceMismatch", f"`{name}` would have the shapes {list(known)} and {list(shape)}")

    def _placeholders(self) -> set[str]:
        return {match[1] for match in _PLACEHOLDER.finditer(self.template)}

    def _templates(self) -> list[str]:
        return [self.template]


@dataclass(frozen=True)
class _Fuse(Expression):
    parts: tuple[Expression, ...]
    dim: int
    sizes: tuple[int, ...] | None

    def _value(self, bindings: _Bindings, stored: _Dict[str, _Shape]) -> _Value:
        values = [part._value(bindings, stored) for part in self.parts]
        first = values[0].shape
        dim = _normalize(self.dim, len(first))
        pieces, length = [], 0
        for value in values:
            if len(value.shape) != len(first) or _without(value.shape, dim) != _without(first, dim):
                shapes = ", ".join(str(list(value.shape)) for value in values)
                raise _Problem("SliceMismatch", f"parts of shapes {shapes} do not fit together in dimension {dim}")
            pieces += [piece._replace(offsets=_add(piece.offsets, dim, length)) for piece in value.pieces]
            length += value.shape[dim]
        return _Value(_with(first, dim, length), pieces)

    def _infer(self, bindings: _Bindings, shape: _Shape, stored: dict[str, _Shape]) -> None:
        dim = _normalize(self.dim, len(shape))
        sizes = self.sizes or (1,) * len(self.parts)
        unit, rest = divmod(shape[dim], sum(sizes))
        if rest:
            text = f"dimension {dim} of {list(shape)} cannot be split in the proportions {list(sizes)}"
            raise _Problem("SliceMismatch", text)
        for part, size in zip(self.parts, sizes):
            part._infer(bindings, _with(shape, dim, unit * size), stored)

    def _children(self) -> tuple[Expression, ...]:
        return self.parts


@dataclass(frozen=True)
class _Stack(Expression):
    parts: tuple[Expression, ...]
    dim: int

    def _value(self, bindings: _Bindings, stored: _Dict[str, _Shape]) -> _Value:
        return _stack([part._value(bindings, stored) for part in self.parts], self.dim)

    def _infer(self, bindings: _Bindings, shape: _Shape, stored: dict[str, _Shape]) -> None:
        dim = _normalize(self.dim, len(shape))
        if shape[dim] != len(self.parts):
            text = f"dimension {dim} of {list(shape)} has {shape[dim]} parts, the rule has {len(self.parts)}"
            raise _Problem("SliceMismatch", text)
        for part in self.parts:
            part._infer(bindings, _without(shape, dim), stored)

    def _children(self) -> tuple[Expression, ...]:
        return self.parts


@dataclass(frozen=True)
class _OfOne(Expression):
    """An expression of one part."""

    part: Expression

    def _children(self) -> tuple[Expression, ...]:
        return (self.part,)


@dataclass(frozen=True)
class _StackOver(_OfOne):
    """A stack with one part for each index."""

    over: str
    indices: tuple[int, ...] | None
    dim: int

    def _value(self, bindings: _Bindings, stored: _Dict[str, _Shape]) -> _Value:
        indices = self.indices
        if indices is None:
            # The stored names say how many parts there are. With no part, the error names the first.
            count = 0
            while self._is_stored(bindings.bind(self.over, count), stored):
                count += 1
            indices = tuple(range(max(count, 1)))
        values = [self.part._value(bindings.bind(self.over, index), stored) for index in indices]
        return _stack(values, self.dim)

    def _is_stored(self, bindings: _Bindings, stored: _Dict[str, _Shape]) -> bool:
        """Returns whether a tensor of the part with an index is stored. Inner stacks begin at index 0."""
        for template in self.part._templates():
            placeholders = {match[1] for match in _PLACEHOLDER.finditer(template)}
            if self.over not in placeholders:
                continue
            inner = {name: "0" for name in placeholders - bindings.values.keys()}
            if _Bindings({**inner, **bindings.values}).name(template) in stored:
                return True
        return False

    def _infer(self, bindings: _Bindings, shape: _Shape, stored: dict[str, _Shape]) -> None:
        dim = _normalize(self.dim, len(shape))
        indices = range(shape[dim]) if self.indices is None else self.indices
        if shape[dim] != len(indices):
            text = f"dimension {dim} of {list(shape)} has {shape[dim]} parts, the rule has {len(indices)}"
            raise _Problem("SliceMismatch", text)
        if not indices:
            raise _Problem("invalid", f"dimension {dim} of {list(shape)} has no parts to store")
        for index in indices:
            self.part._infer(bindings.bind(self.over, index), _without(shape, dim), stored)

    def _placeholders(self) -> set[str]:
        return self.part._placeholders() - {self.over}


@dataclass(frozen=True)
class _Narrow(_OfOne):
    dim: int
    start: int
    length: int

    def _value(self, bindings: _Bindings, stored: _Dict[str, _Shape]) -> _Value:
        value = self.part._value(bindings, stored)
        dim = _normalize(self.dim, len(value.shape))
        if self.start + self.length > value.shape[dim]:
            text = f"dimension {dim} of {list(value.shape)} has no elements {self.start}..{self.start + self.length}"
            raise _Problem("SliceMismatch", text)
        return _narrow(value, dim, self.start, self.length)

    def _infer(self, bindings: _Bindings, shape: _Shape, stored: dict[str, _Shape]) -> None:
        names = ", ".join(f"`{bindings.name(name)}`" for name in self.part._templates())
        raise _Problem("invalid", f"a rule with narrow cannot put: the size of {names} is not known")


@dataclass(frozen=True)
class _Shard(_OfOne):
    dim: int
    index: int
    count: int

    def _value(self, bindings: _Bindings, stored: _Dict[str, _Shape]) -> _Value:
        value = self.part._value(bindings, stored)
        dim = _normalize(self.dim, len(value.shape))
        length, rest = divmod(value.shape[dim], self.count)
        if rest:
            text = f"dimension {dim} of {list(value.shape)} cannot be split into {self.count} equal shards"
            raise _Problem("SliceMismatch", text)
        return _narrow(value, dim, self.index * length, length)

    def _infer(self, bindings: _Bindings, shape: _Shape, stored: dict[str, _Shape]) -> None:
        dim = _normalize(self.dim, len(shape))
        self.part._infer(bindings, _with(shape, dim, shape[dim] * self.count), stored)


@dataclass(frozen=True)
class _Transpose(_OfOne):
    dim0: int
    dim1: int

    def _value(self, bindings: _Bindings, stored: _Dict[str, _Shape]) -> _Value:
        value = self.part._value(bindings, stored)
        order = self._order(len(value.shape))
        pieces = [
            piece._replace(offsets=_permute(piece.offsets, order), dims=tuple(order[dim] for dim in piece.dims))
            for piece in value.pieces
        ]
        return _Value(_permute(value.shape, order), pieces)

    def _infer(self, bindings: _Bindings, shape: _Shape, stored: dict[str, _Shape]) -> None:
        self.part._infer(bindings, _permute(shape, self._order(len(shape))), stored)

    def _order(self, rank: int) -> list[int]:
        """Returns the permutation of the dimensions, which is its own inverse."""
        dim0, dim1 = _normalize(self.dim0, rank), _normalize(self.dim1, rank)
        order = list(range(rank))
        order[dim0], order[dim1] = dim1, dim0
        return order


@dataclass(frozen=True)
class _Quantize(_OfOne):
    """A tensor with elements of 8 bits, or its scales."""

    block: tuple[int, int]
    has_scales: bool

    def _value(self, bindings: _Bindings, stored: _Dict[str, _Shape]) -> _Value:
        value = self.part._value(bindings, stored)
        if len(value.shape) < 2:
            raise _Problem(
                "SliceMismatch", f"a tensor of shape {list(value.shape)} has no blocks: it needs 2 dimensions"
            )
        return value

    def _infer(self, bindings: _Bindings, shape: _Shape, stored: dict[str, _Shape]) -> None:
        names = ", ".join(f"`{bindings.name(name)}`" for name in self.part._templates())
        raise _Problem("invalid", f"a rule that quantizes cannot put: {names} cannot be computed from it")

    def _transform(self, value: _Value) -> Transform:
        kind = _block_scaling.Scales if self.has_scales else _block_scaling.Elements
        return kind(value.shape, self.block)


def fuse(*parts: str | Expression, dim: int = 0, sizes: Iterable[int] | None = None) -> Expression:
    """Concatenates tensors, as `torch.cat`.

    Args:
        parts: names of stored tensors, or expressions.
        dim: the dimension in which the parts follow each other. Negative: counted from the last one.
        sizes: the proportions of the parts in `dim`, for puts, such as the numbers of heads of q, k and v. A get does
            not need them. None: all parts have the same size.
    """
    expressions = _expressions("fuse", parts)
    proportions = None if sizes is None else tuple(sizes)
    if proportions is not None and (len(proportions) != len(expressions) or min(proportions) < 1):
        raise _invalid(
            f"`sizes` has {len(proportions)} numbers for {len(expressions)} parts: give a positive one for each"
        )
    return _Fuse(expressions, dim, proportions)


def stack(
    *parts: str | Expression, dim: int = 0, over: str | None = None, indices: Iterable[int] | None = None
) -> Expression:
    """Stacks tensors of one shape in a new dimension, as `torch.stack`.

    Args:
        parts: names of stored tensors, or expressions. With `over`, one part.
        dim: the new dimension. Negative: counted from the last one.
        over: the placeholder that numbers the parts: `stack("experts.{e}.w1", over="e")`.
        indices: the numbers of `over`, such as `range(8, 16)` for the experts of one rank. None: 0, 1 and so on, as
            many as are stored, or as the tensor that is put has.
    """
    expressions = _expressions("stack", parts)
    if over is None:
        if indices is not None:
            raise _invalid("`indices` are those of `over`: say over which placeholder")
        return _Stack(expressions, dim)
    if len(expressions) != 1:
        raise _invalid(f"stack with `over` has one part, not {len(expressions)}")
    if over not in expressions[0]._placeholders():
        raise _invalid(f"the part of stack does not have the placeholder `{{{over}}}`")
    numbers = None if indices is None else tuple(indices)
    if numbers == ():
        raise _invalid("`indices` is empty")
    return _StackOver(expressions[0], over, numbers, dim)


def narrow(part: str | Expression, dim: int, start: int, length: int) -> Expression:
    """Takes a part of a tensor, as `torch.narrow`. Only for gets.

    Args:
        part: the name of a stored tensor, or an expression.
        dim: the dimension. Negative: counted from the last one.
        start: the first element in that dimension.
        length: the number of elements in that dimension.
    """
    if start < 0 or length < 0:
        raise _invalid(f"`start` and `length` are at least 0, not {start} and {length}")
    return _Narrow(_expression(part), dim, start, length)


def shard(part: str | Expression, dim: int, index: int, count: int) -> Expression:
    """Takes one of `count` equal shards of a tensor, such as that of a tensor-parallel rank.

    Args:
        part: the name of a stored tensor, or an expression.
        dim: the dimension in which the tensor is sharded. Negative: counted from the last one.
        index: the number of the shard: the rank.
        count: the number of shards.
    """
    if not 0 <= index < count:
        raise _invalid(f"shard {index} of {count} does not exist")
    return _Shard(_expression(part), dim, index, count)


def transpose(part: str | Expression, dim0: int, dim1: int) -> Expression:
    """Exchanges two dimensions of a tensor, as `torch.transpose`."""
    return _Transpose(_expression(part), dim0, dim1)


def quantize(part: str | Expression, block: tuple[int, int] = (128, 128)) -> Expression:
    """Quantizes a tensor to float8_e4m3fn, with one scale for each block. Only for gets.

    It is the outermost part of a rule.

    The blocks are those of the global tensor, so each rank gets the elements that a quantization of the whole tensor
    has. A rank whose shard cuts blocks reads these blocks whole.

    Args:
        part: the name of a stored tensor, or an expression. Its elements are floating, and of at least 16 bits.
        block: the shape of a block, in the last two dimensions. Blocks at the end can be smaller.

    Example:
        ```
        Mapping({
            "{p:path}.weight": quantize("{p}.weight"),
            "{p:path}.weight_scale_inv": block_scales("{p}.weight"),
        })
        ```
    """
    return _Quantize(_expression(part), _block(block), False)


def block_scales(part: str | Expression, block: tuple[int, int] = (128, 128)) -> Expression:
    """Returns the scales of `quantize` of a tensor, as float32: the element is the quantized one times its scale.

    The last two dimensions have one scale for each block. The scale is the largest magnitude of the block divided by
    448, and 1 for a block of zeros.

    Args:
        part: the name of a stored tensor, or an expression, as in `quantize`.
        block: the shape of a block, in the last two dimensions, as in `quantize`.
    """
    return _Quantize(_expression(part), _block(block), True)


def _block(block: tuple[int, int]) -> tuple[int, int]:
    if len(block) != 2 or min(block) < 1:
        raise _invalid(f"a block has two sizes of at least 1, not {block!r}")
    return block[0], block[1]


class _Rule(NamedTuple):
    pattern: re.Pattern[str]
    expression: Expression


class _Plan(NamedTuple):
    """The pieces of each tensor with a rule, the tensors that do not fit their rules, and what computes tensors."""

    pieces: dict[str, list[_Piece]]
    # The name of the tensor, the error kind and the text.
    problems: list[tuple[str, str, str]]
    transforms: dict[str, Transform]


@dataclass(frozen=True)
class Mapping:
    """Rules that say which stored tensors the tensors of a process consist of.

    Args:
        rules: names of tensors of the process, each with the name of a stored tensor, or an expression: `fuse`,
            `stack`, `narrow`, `shard`, `transpose`, `quantize`, `block_scales`. The first rule whose name fits is
            used. A name can have placeholders, as routes of web frameworks do: `{name}` is a part of the name without
            a dot, `{name:int}` a number, and `{name:path}` any text. The stored names repeat them: `{name}`.

    Raises:
        TssdValueError: a rule is invalid.

    Example:
        `Mapping({"{name:path}": "model.{name}"})` adds a prefix to the names of all tensors.
    """

    rules: _Dict[str, str | Expression]
    _compiled: list[_Rule] = field(init=False, repr=False, compare=False)
    # The rule of each name so far, so that later calls need no regular expressions.
    _found: dict[str, tuple[Expression, _Bindings] | None] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        rules = [_compile(name, expression) for name, expression in self.rules.items()]
        object.__setattr__(self, "_compiled", rules)

    def _find(self, name: str) -> tuple[Expression, _Bindings] | None:
        if name not in self._found:
            matches = ((rule, rule.pattern.fullmatch(name)) for rule in self._compiled)
            found = ((rule.expression, _Bindings(match.groupdict())) for rule, match in matches if match)
            self._found[name] = next(found, None)
        return self._found[name]

    def _plan(
        self,
        shapes: _Dict[str, _Shape],
        evaluate: Callable[[Expression, _Bindings, _Shape], _Value],
    ) -> _Plan:
        plans, problems, transforms = {}, [], {}
        for name, shape in shapes.items():
            found = self._find(name)
            if found is None:
                continue
            try:
                value = evaluate(*found, shape)
                transform = found[0]._transform(value)
                result = value.shape if transform is None else transform.shape
                if result != shape:
                    text = f"it has shape {list(shape)}, its stored parts {list(result)}"
                    raise _Problem("SliceMismatch", text)
                if transform is not None:
                    transforms[name] = transform
                plans[name] = value.pieces
            except _Problem as problem:
                problems.append((name, problem.kind, f"`{name}`: {problem}"))
        return _Plan(plans, problems, transforms)

    def _plan_get(self, shapes: _Dict[str, _Shape], stored: _Dict[str, _Shape]) -> _Plan:
        return self._plan(shapes, lambda expression, bindings, _: expression._value(bindings, stored))

    def _plan_put(self, shapes: _Dict[str, _Shape]) -> _Plan:
        """As `_plan_get`, with the shapes of the stored tensors inferred."""

        def evaluate(expression: Expression, bindings: _Bindings, shape: _Shape) -> _Value:
            stored: dict[str, _Shape] = {}
            expression._infer(bindings, shape, stored)
            return expression._value(bindings, stored)

        return self._plan(shapes, evaluate)


def _compile(name: str, expression: str | Expression) -> _Rule:
    _check_braces(name)
    pattern, end = "", 0
    bound = set()
    for match in _PLACEHOLDER.finditer(name):
        placeholder, converter = match.groups()
        if converter not in _CONVERTERS:
            raise _invalid(
                f"`{name}`: the kinds of placeholders are `{{x}}`, `{{x:int}}` and `{{x:path}}`, not `{match[0]}`"
            )
        if placeholder in bound:
            raise _invalid(f"`{name}` has the placeholder `{{{placeholder}}}` twice")
        bound.add(placeholder)
        pattern += f"{re.escape(name[end : match.start()])}(?P<{placeholder}>{_CONVERTERS[converter]})"
        end = match.end()
    pattern += re.escape(name[end:])
    compiled = _expression(expression)
    if any(isinstance(inner, _Quantize) for outer in _walk(compiled) for inner in outer._children()):
        raise _invalid(f"`{name}`: quantize and block_scales are the outermost part of a rule")
    unbound = compiled._placeholders() - bound
    if unbound:
        names = ", ".join(f"`{{{placeholder}}}`" for placeholder in sorted(unbound))
        raise _invalid(f"`{name}` does not have the placeholder {names} of its stored tensors")
    return _Rule(re.compile(pattern), compiled)


def _walk(expression: Expression) -> Iterable[Expression]:
    yield expression
    for child in expression._children():
        yield from _walk(child)


def _expression(part: str | Expression) -> Expression:
    if isinstance(part, Expression):
        return part
    if isinstance(part, str):
        _check_braces(part)
        return _Stored(part)
    raise TypeError(f"a rule has the name of a stored tensor or an expression, not a {type(part).__name__}")


def _check_braces(name: str) -> None:
    """Checks that a name has no braces that are no placeholder."""
    rest = _PLACEHOLDER.sub("", name)
    if "{" in rest or "}" in rest:
        raise _invalid(f"`{name}`: a placeholder is an identifier in braces, such as `{{n}}`")


def _expressions(function: str, parts: tuple[str | Expression, ...]) -> tuple[Expression, ...]:
    if not parts:
        raise _invalid(f"{function} needs at least one part")
    return tuple(map(_expression, parts))


def _stack(values: list[_Value], dim: int) -> _Value:
    first = values[0].shape
    dim = _normalize(dim, len(first) + 1)
    pieces = []
    for index, value in enumerate(values):
        if value.shape != first:
            raise _Problem("SliceMismatch", f"parts of shapes {list(first)} and {list(value.shape)} cannot be stacked")
        for piece in value.pieces:
            offsets = (*piece.offsets[:dim], index, *piece.offsets[dim:])
            pieces.append(piece._replace(offsets=offsets, dims=tuple(each + (each >= dim) for each in piece.dims)))
    return _Value((*first[:dim], len(values), *first[dim:]), pieces)


def _narrow(value: _Value, dim: int, start: int, length: int) -> _Value:
    pieces = []
    for piece in value.pieces:
        axis = piece.dims.index(dim) if dim in piece.dims else None
        size = 1 if axis is None else piece.sizes[axis]
        first, last = max(start, piece.offsets[dim]), min(start + length, piece.offsets[dim] + size)
        if first >= last:
            continue
        skipped = first - piece.offsets[dim]
        piece = piece._replace(offsets=_with(piece.offsets, dim, first - start))
        if axis is not None:
            stored_offsets = _add(piece.stored_offsets, axis, skipped)
            piece = piece._replace(stored_offsets=stored_offsets, sizes=_with(piece.sizes, axis, last - first))
        pieces.append(piece)
    return _Value(_with(value.shape, dim, length), pieces)


def _normalize(dim: int, rank: int) -> int:
    if not -rank <= dim < rank:
        raise _Problem("SliceMismatch", f"a tensor of {rank} dimensions has no dimension {dim}")
    return dim % rank


def _with(values: _Shape, index: int, value: int) -> _Shape:
    return (*values[:index], value, *values[index + 1 :])


def _without(values: _Shape, index: int) -> _Shape:
    return values[:index] + values[index + 1 :]


def _add(values: _Shape, index: int, amount: int) -> _Shape:
    return _with(values, index, values[index] + amount)


def _permute(values: _Shape, order: list[int]) -> _Shape:
    return tuple(values[dim] for dim in order)


def _invalid(text: str) -> TssdError:
    return new_exception("invalid", "", text, None, None, None, None)
