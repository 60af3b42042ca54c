"""A KV cache in 1.5 to 4 bits for Hugging Face transformers."""

from lowkv._core import Error, default_scheme, presets

__all__ = ["Error", "default_scheme", "presets"]
