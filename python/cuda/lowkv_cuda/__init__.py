"""CUDA devices for lowkv's caches: nothing to call. lowkv imports it for `device="cuda"`, and for models on a GPU."""

from lowkv_cuda._device import device, interface

__all__ = ["device", "interface"]
