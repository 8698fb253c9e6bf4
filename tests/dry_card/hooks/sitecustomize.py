"""With DRY_CARD_VALUES=1: give values to torch's operations as soon as torch is imported. run.sh puts it on PYTHONPATH."""
import importlib.abc
import importlib.util
import os
import re
import sys

_kept = []


class _AfterTorch(importlib.abc.MetaPathFinder):
    _asking = False

    def find_spec(self, name, path, target=None):
        if name != "torch" or "torch" in sys.modules or self._asking:
            return None
        self._asking = True  # programs ask for the spec alone, too, so it may be asked for several times
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self._asking = False
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's graphs have no fake
            if os.environ.get("DRY_CARD_VALUES") == "1":
                module.ops.load_library(os.path.join(os.environ["DRY_CARD_BUILD"], "values.so"))
                import aten_values

                _kept.append(aten_values.install())

        spec.loader.exec_module = exec_module
        return spec


class _AfterInterpreter(importlib.abc.MetaPathFinder):
    """DRY_CARD_SKIP: a pattern of names of Triton kernels that do nothing, because their interpretation takes too long."""

    def find_spec(self, name, path, target=None):
        if name != "triton.runtime.interpreter":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            pattern, launch = re.compile(os.environ["DRY_CARD_SKIP"]), module.GridExecutor.__call__

            def call(self, *args, **kwargs):
                if not pattern.search(self.fn.__name__):
                    return launch(self, *args, **kwargs)

            module.GridExecutor.__call__ = call

        spec.loader.exec_module = exec_module
        return spec


class _AfterVllm(importlib.abc.MetaPathFinder):
    """Give values to vLLM's own operations."""

    NAMES = {
        "vllm.lora.punica_wrapper.punica_gpu",
        "vllm._custom_ops",
        "vllm.v1.attention.ops.triton_unified_attention",
        "vllm.v1.attention.ops.triton_reshape_and_cache_flash",
        "vllm.vllm_flash_attn.flash_attn_interface",
    }

    def find_spec(self, name, path, target=None):
        if name not in self.NAMES:
            return None
        self.NAMES.remove(name)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            import vllm_values

            vllm_values.HOOKS[name](module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("DRY_CARD_VALUES") == "1":
    sys.meta_path.insert(0, _AfterVllm())
if os.environ.get("DRY_CARD_SKIP"):
    sys.meta_path.insert(0, _AfterInterpreter())
if "DRY_CARD_VALUES" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
