"""LoRA adapters of peft in archives and stores, and their hot swap."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .._errors import TssdError, new_exception
from .._tssd import Store, load_file, safe_open, save_file

# The attribute of an archive or a version with the configuration of the adapter, in JSON.
_CONFIG = "peft_config"


def save_adapter(
    model: Any, target: str | os.PathLike[str] | Store, key: str | None = None, *, adapter_name: str = "default"
) -> None:
    """Saves an adapter with its configuration, as an archive or as a new version of a key.

    Args:
        model: a model of peft.
        target: the path of the archive. With `key`, a store or its address.
        key: the key in the store.
        adapter_name: the name of the adapter in the model.

    Raises:
        TssdKeyError: the model has no such adapter.
    """
    from peft import get_peft_model_state_dict

    config = _config_of(model, adapter_name)
    state = get_peft_model_state_dict(model, adapter_name=adapter_name)
    fields = {name: value for name, value in config.to_dict().items() if name != "runtime_config"}
    metadata = {_CONFIG: json.dumps(fields, default=_to_json)}
    if key is None and not isinstance(target, Store):
        save_file(state, target, metadata={**metadata})
        return
    with _open_store(target, key) as (store, name):
        store.put_state_dict(state, name, metadata=metadata)


def hotswap_adapter(
    model: Any,
    source: str | os.PathLike[str] | Store,
    key: str | None = None,
    *,
    version: int | str | None = None,
    adapter_name: str = "default",
    config: Any = None,
    timeout: float | None = None,
) -> int | None:
    """Replaces the weights of an adapter in place with those that `save_adapter` stored.

    Names, shapes and configuration are checked before a weight changes. The ranks of the two adapters can differ, as
    for `peft.utils.hotswap.hotswap_adapter`.

    Args:
        model: a model of peft, which can be compiled.
        source: the path of the archive. With `key`, a store or its address.
        key: the key in the store.
        version: the version number, or a label that pins it. None: the newest one.
        adapter_name: the name of the adapter in the model.
        config: the configuration of the new adapter. None: the stored one.
        timeout: how many seconds to wait for the store.

    Returns:
        The version number. None for an archive.

    Raises:
        TssdKeyError: the adapter, the key or the version does not exist.
        TssdValueError: the stored adapter does not fit the model.
    """
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
    from peft.utils.hotswap import check_hotswap_configs_compatible, hotswap_adapter_from_state_dict

    own = _config_of(model, adapter_name)
    number = None
    if key is None and not isinstance(source, Store):
        state = load_file(source)
        with safe_open(source, "pt") as file:
            metadata = file.metadata()
        description = f"`{source}`"
    else:
        with _open_store(source, key) as (store, name), store.open(name, version=version, timeout=timeout) as opened:
            number, metadata = opened.version, opened.metadata()
            state = store.get_state_dict(name, version=opened, timeout=timeout)
        description = f"version {number} of key `{name}`"
    if config is None:
        config = _stored_config(metadata, description)
    try:
        check_hotswap_configs_compatible(own, config)
    except ValueError as error:
        raise _misfit(description, adapter_name, str(error)) from error
    prefix = PEFT_TYPE_TO_PREFIX_MAPPING[config.peft_type]
    state = {_with_adapter(name, prefix, adapter_name): tensor for name, tensor in state.items()}
    _check(model, state, prefix, adapter_name, description)
    hotswap_adapter_from_state_dict(model, state, adapter_name, config, prefix)
    return number


@contextmanager
def _open_store(store: str | os.PathLike[str] | Store, key: str | None) -> Iterator[tuple[Store, str]]:
    """Opens a store by its address, and closes it at the end. An open store stays open."""
    if key is None:
        raise new_exception("invalid", "", f"{store!r} has keys, and none is given", None, "give key=", None, None)
    if isinstance(store, Store):
        yield store, key
    else:
        with Store(os.fspath(store)) as opened:
            yield opened, key


def _config_of(model: Any, adapter_name: str) -> Any:
    configs = getattr(getattr(model, "_orig_mod", model), "peft_config", None) or {}
    if adapter_name not in configs:
        text = f"{type(model).__name__} has no adapter `{adapter_name}`: it has {sorted(configs) or 'none'}"
        raise new_exception("NotFound", "", text, None, "give adapter_name=", None, None)
    return configs[adapter_name]


def _stored_config(metadata: dict[str, Any] | None, description: str) -> Any:
    import peft

    text = (metadata or {}).get(_CONFIG)
    if text is None:
        message = f"{description} has no configuration of an adapter"
        advice = "store it with save_adapter, or give config="
        raise new_exception("invalid", "", message, None, advice, None, None)
    factory: Any = peft.PeftConfig
    return factory.from_peft_type(**json.loads(text))


def _with_adapter(name: str, prefix: str, adapter_name: str) -> str:
    """Returns the name of a tensor in the model: "x.lora_A.weight" is "x.lora_A.default.weight" there."""
    head, found, rest = name.rpartition(prefix)
    if not found:
        return name
    kind, dot, suffix = rest.partition(".")
    return f"{head}{found}{kind}.{adapter_name}{dot}{suffix}"


def _check(model: Any, state: dict[str, Any], prefix: str, adapter_name: str, description: str) -> None:
    """Checks the names and the dimensions. peft finds misfits after it has changed weights."""
    own = getattr(model, "_orig_mod", model).state_dict()
    for name, tensor in state.items():
        if name not in own:
            raise _misfit(description, adapter_name, f"the model has no `{name}`")
        # The dimensions of the rank can differ: rows of lora_A, columns of lora_B.
        shapes = [list(own[name].shape), list(tensor.shape)]
        rank = 1 if f"{prefix}B." in name else 0
        for shape in shapes:
            if len(shape) > rank and f"{prefix}" in name:
                shape[rank] = 0
        if shapes[0] != shapes[1]:
            text = f"`{name}` has shape {list(tensor.shape)}, and {list(own[name].shape)} in the model"
            raise _misfit(description, adapter_name, text)
    if not any(prefix in name for name in state):
        raise _misfit(description, adapter_name, f"no name has `{prefix}`")


def _misfit(description: str, adapter_name: str, reason: str) -> TssdError:
    text = f"{description} does not fit the adapter `{adapter_name}`: {reason}"
    advice = "save it from a model with the same adapter configuration"
    return new_exception("invalid", "", text, None, advice, None, None)


def _to_json(value: Any) -> Any:
    """Converts a set of a configuration to a list."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"the configuration has a {type(value).__name__}")
