"""Tensors that are read when they are indexed: those of versions, and those that a mapping makes of stored parts."""

from __future__ import annotations

import re
from collections.abc import Mapping as _Dict
from collections.abc import Sequence
from typing import Any

import torch

from ..mapping import _CONVERTERS, _PLACEHOLDER, Mapping, _Piece, _Problem, _Shape, _Stored

_Mapped = tuple[_Shape, list[_Piece]]


def mapped_pieces(
    mapping: Mapping, shapes: _Dict[str, _Shape]
) -> tuple[dict[str, _Mapped], list[tuple[str, str, str]]]:
    """Finds the tensors that a mapping makes of stored tensors.

    Args:
        mapping: the mapping.
        shapes: the shapes of the stored tensors.

    Returns:
        Shape and pieces of each tensor, by name; and the tensors that do not fit: name, error kind, text.
    """
    mapped: dict[str, _Mapped] = {}
    problems = []
    renamed = []
    for name in _find_names(mapping, shapes):
        found = mapping._find(name)
        assert found is not None
        try:
            value = found[0]._value(found[1], shapes)
        except _Problem as problem:
            problems.append((name, problem.kind, f"`{name}`: {problem}"))
            continue
        if found[0]._transform(value) is not None:
            problems.append((name, "invalid", f"`{name}`: a lazy state dict does not quantize"))
            continue
        mapped[name] = value.shape, value.pieces
        if isinstance(found[0], _Stored):
            renamed.append(name)
    # A rule that renames does not apply to the parts of other tensors.
    parts = {piece.stored for name, (_, pieces) in mapped.items() if name not in renamed for piece in pieces}
    for name in renamed:
        if mapped[name][1][0].stored in parts:
            del mapped[name]
    return mapped, problems


def _find_names(mapping: Mapping, shapes: _Dict[str, _Shape]) -> list[str]:
    """Returns the names of tensors with a rule of which a part is stored, in the order of the rules."""
    names: dict[str, None] = {}
    for (rule_name, _), rule in zip(mapping.rules.items(), mapping._compiled):
        converters = {match[1]: match[2] for match in _PLACEHOLDER.finditer(rule_name)}
        for template in rule.expression._templates():
            for bound in _match_stored(template, converters, shapes):
                if converters.keys() <= bound.keys():
                    name = _PLACEHOLDER.sub(r"{\1}", rule_name).format_map(bound)
                    found = mapping._find(name)
                    if found is not None and found[0] is rule.expression:
                        names[name] = None
    return list(names)


def _match_stored(template: str, converters: dict[str, Any], shapes: _Dict[str, _Shape]) -> list[dict[str, str]]:
    """Returns the values of the placeholders for each stored name that fits."""
    if _PLACEHOLDER.search(template) is None:
        return [{}] if template in shapes else []
    pattern = _stored_pattern(template, converters)
    matches = (pattern.fullmatch(stored) for stored in shapes)
    return [match.groupdict() for match in matches if match is not None]


def _stored_pattern(template: str, converters: dict[str, Any]) -> re.Pattern[str]:
    """Compiles the name of a stored tensor. Placeholders that the name of the rule lacks are those of `stack`."""
    pattern, end = "", 0
    bound = set()
    for match in _PLACEHOLDER.finditer(template):
        pattern += re.escape(template[end : match.start()])
        name = match[1]
        kind = _CONVERTERS[converters[name]] if name in converters else _CONVERTERS["int"]
        pattern += f"(?P={name})" if name in bound else f"(?P<{name}>{kind})"
        bound.add(name)
        end = match.end()
    return re.compile(pattern + re.escape(template[end:]))


class MappedSlice:
    """A tensor that is assembled of pieces when it is indexed."""

    def __init__(self, shape: _Shape, dtype: torch.dtype, pieces: list[_Piece], contents: dict[str, Any]) -> None:
        self.dtype = dtype
        self._shape = shape
        self._pieces = [(piece, contents[piece.stored]) for piece in pieces]

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        starts, stops, relative = bounding_box(index, self._shape)
        parts = []
        for piece, content in self._pieces:
            part = _intersect(piece, starts, stops)
            if part is not None:
                stored_index, target, order = part
                parts.append((content[stored_index].permute(order), target))
        sizes = [max(stop - start, 0) for start, stop in zip(starts, stops)]
        result: torch.Tensor
        if len(parts) == 1 and list(parts[0][0].shape) == sizes:
            result = parts[0][0]
        else:
            result = torch.empty(sizes, dtype=self.dtype)
            for tensor, target in parts:
                result[target] = tensor
        return result[relative]


def _intersect(piece: _Piece, starts: list[int], stops: list[int]) -> tuple[Any, Any, list[int]] | None:
    """Returns the index of a piece in its stored tensor, its index in a box, and the order of its dimensions there."""
    axis_of = {dim: axis for axis, dim in enumerate(piece.dims)}
    stored_index: list[slice] = [slice(None)] * len(piece.dims)
    target: list[int | slice] = []
    for dim, (start, stop) in enumerate(zip(starts, stops)):
        axis = axis_of.get(dim)
        size = 1 if axis is None else piece.sizes[axis]
        first, last = max(start, piece.offsets[dim]), min(stop, piece.offsets[dim] + size)
        if first >= last:
            return None
        if axis is None:
            target.append(first - start)
        else:
            begin = piece.stored_offsets[axis] + first - piece.offsets[dim]
            stored_index[axis] = slice(begin, begin + last - first)
            target.append(slice(first - start, last - start))
    return tuple(stored_index), tuple(target), [axis_of[dim] for dim in sorted(axis_of)]


def bounding_box(index: Any, shape: Sequence[int]) -> tuple[list[int], list[int], Any]:
    """Returns the box that contains what an index of ints, slices and `...` selects, and the index into the box."""
    parts = list(index) if isinstance(index, tuple) else [index]
    ellipses = [position for position, part in enumerate(parts) if part is ...]
    count = len(parts) - len(ellipses)
    if len(ellipses) > 1 or count > len(shape):
        raise IndexError(f"too many indices for a tensor of {len(shape)} dimensions")
    position = ellipses[0] if ellipses else len(parts)
    parts[position : position + 1] = [slice(None)] * (len(shape) - count)
    starts: list[int] = []
    stops: list[int] = []
    relative: list[int | slice] = []
    for dim, (part, size) in enumerate(zip(parts, shape)):
        if isinstance(part, slice):
            chosen = range(size)[part]
            if chosen.step < 0:
                raise IndexError(f"the step of dimension {dim} is {chosen.step}: tensors have positive steps")
            low, high = (chosen[0], chosen[-1] + 1) if chosen else (0, 0)
            relative.append(slice(None, None, chosen.step))
        else:
            low = range(size)[part]
            high = low + 1
            relative.append(0)
        starts.append(low)
        stops.append(high)
    return starts, stops, tuple(relative)
