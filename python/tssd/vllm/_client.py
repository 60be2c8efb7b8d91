"""The client of a trainer whose engine is in the same process."""

from __future__ import annotations

from typing import Any


class LLMClient:
    """A trainer's client of a `vllm.LLM` in this process.

    The same as `HTTPVLLMWeightSyncClient` of vLLM, for an engine without a server:

        trainer_init(TrainerInit(...), client=LLMClient(llm), source=ModuleSource(model))
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update(weight_version)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Returns whether the engine has reset its prefix cache."""
        return bool(self.llm.reset_prefix_cache(reset_running_requests))
