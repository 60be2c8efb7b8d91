"""The API of torchstore, on the daemon of this package: `import tssd.torchstore as ts`.

    await ts.initialize()
    await ts.put_state_dict(model.state_dict(), "policy")
    await ts.get_state_dict("policy", user_state_dict=other.state_dict())

For a framework that imports `torchstore` itself, `install()` makes `import torchstore` return this module in the
current process. `PYTHONPATH=$(python -m tssd.torchstore)` does so in all processes of a program. docs/migration.md
lists the differences.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from . import _actors, _api, _client, _logging, _strategy, _transport
from . import _spmd as spmd
from ._api import (
    client,
    delete,
    delete_batch,
    exists,
    get,
    get_batch,
    get_state_dict,
    initialize,
    keys,
    put,
    put_batch,
    put_state_dict,
    reset_client,
)
from ._logging import init_logging
from ._spmd import initialize as initialize_spmd
from ._spmd import shutdown
from ._strategy import ControllerStorageVolumes, HostStrategy, LocalRankStrategy, TorchStoreStrategy
from ._transport import Request, TensorSlice, TransportType

__all__ = [
    "ControllerStorageVolumes",
    "HostStrategy",
    "LocalRankStrategy",
    "Request",
    "TensorSlice",
    "TorchStoreStrategy",
    "TransportType",
    "client",
    "delete",
    "delete_batch",
    "exists",
    "get",
    "get_batch",
    "get_state_dict",
    "init_logging",
    "initialize",
    "initialize_spmd",
    "install",
    "keys",
    "put",
    "put_batch",
    "put_state_dict",
    "reset_client",
    "shutdown",
    "spmd",
]

# The modules of torchstore that programs import from, each with its contents.
_MODULES: dict[str, dict[str, Any]] = {
    "api": {name: getattr(_api, name) for name in _api.__all__} | {"shutdown": shutdown},
    "client": {"LocalClient": _client.LocalClient},
    "logging": {"init_logging": init_logging},
    "spmd": {name: getattr(spmd, name) for name in ("SPMDEnv", "initialize")},
    "state_dict_utils": {
        "DELIM": _client.DELIM,
        "MAPPING": _client.MAPPING,
        "get_state_dict": _client.LocalClient.get_state_dict,
        "put_state_dict": _client.LocalClient.put_state_dict,
    },
    "strategy": {name: getattr(_strategy, name) for name in _strategy.__all__},
    "transport": {name: getattr(_transport, name) for name in _transport.__all__},
    # The name of `transport.types` in torchstore 0.1.2.
    "transport.pipe": {"Request": Request, "TensorSlice": TensorSlice},
    "transport.types": {"Request": Request, "TensorSlice": TensorSlice},
    "utils": {"spawn_actors": _actors.spawn_actors},
}


def install() -> None:
    """Makes `import torchstore` return this module.

    Submodules of torchstore, such as `torchstore.transport`, are replaced too. Call it once in each process, before any
    module that imports torchstore is imported.

    Raises:
        RuntimeError: the real torchstore has been imported.
    """
    own = sys.modules[__name__]
    if sys.modules.get("torchstore", own) is not own:
        raise RuntimeError("torchstore itself has been imported: call install() before")
    sys.modules["torchstore"] = own
    for name, contents in _MODULES.items():
        module = ModuleType(f"torchstore.{name}", f"The API of torchstore.{name}.")
        vars(module).update(contents)
        sys.modules[module.__name__] = module
        # As an import does. A function of the same name is not replaced.
        parent, _, last = module.__name__.rpartition(".")
        if last not in vars(sys.modules[parent]):
            setattr(sys.modules[parent], last, module)
