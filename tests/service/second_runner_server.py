"""`vllm serve` with vLLM's second model runner on a CPU; see `tests.second_runner`."""

from __future__ import annotations

from tests.second_runner import allow_second_runner

allow_second_runner()  # also in the engine's process, which imports this module

if __name__ == "__main__":
    import runpy

    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
