"""A KV cache in 1.5 to 4 bits for Hugging Face transformers.

`default_scheme` is the scheme that is taken where none is named; `presets()` lists the others."""

from typing import TYPE_CHECKING

from lowkv._core import Error, default_scheme, presets
from lowkv.quantize import dequantize_keys, dequantize_values, quantize_keys, quantize_values

if TYPE_CHECKING:
    from lowkv.cache import Cache
    from lowkv.generation import generate
    from lowkv.kivi import KiviCache
    from lowkv.llama_cpp import plugin_path
    from lowkv.steps import restore

__all__ = ["Cache", "Error", "KiviCache", "default_scheme", "dequantize_keys", "dequantize_values", "generate",
           "plugin_path", "presets", "quantize_keys", "quantize_values", "restore"]

# What needs torch and transformers is imported when it is asked for: the kernel-level functions do without.
_LAZY = {"Cache": "lowkv.cache", "KiviCache": "lowkv.kivi", "generate": "lowkv.generation",
         "plugin_path": "lowkv.llama_cpp", "restore": "lowkv.steps"}


def __getattr__(name):
    if name == "__version__":
        from importlib.metadata import version

        return version("lowkv")
    if name not in _LAZY:
        raise AttributeError(f"module 'lowkv' has no attribute '{name}'")
    import importlib

    try:
        return getattr(importlib.import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        raise ImportError(f"lowkv.{name} needs {error.name}: pip install torch transformers (for a machine "
                          "without a GPU, torch's CPU wheel)") from error
