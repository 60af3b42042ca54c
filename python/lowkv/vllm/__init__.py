"""lowkv's cache in vLLM on the CPU: packed pages in vLLM's own paged cache, attention in place (docs/vllm.md).

`LOWKV_SCHEME=lowkv2.8` in the environment turns it on: engines then keep their cache so, or refuse to start and say
why. Without it both entry points return at once, and vLLM is as if lowkv were not installed."""

import os

VARIABLE = "LOWKV_SCHEME"


def platform() -> str | None:
    """vLLM's entry point `vllm.platform_plugins`: the class of the platform, or None.

    vLLM takes an exception here for "not this platform", so unsupported versions and devices are refused when it
    imports the class."""
    return "lowkv.vllm.platform.Platform" if os.environ.get(VARIABLE) else None


def require() -> None:
    """vLLM's entry point `vllm.general_plugins`, called in each of its processes: raises Error where the environment
    names a scheme and vLLM has another platform, with which it would serve its own cache."""
    if not os.environ.get(VARIABLE):
        return
    from vllm.platforms import current_platform

    from lowkv.vllm.platform import Platform

    if not isinstance(current_platform, Platform):
        from lowkv import Error

        raise Error(f"{VARIABLE} is set, but vLLM's platform is {type(current_platform).__name__}: set {VARIABLE} "
                    "before vLLM is imported, unset VLLM_TARGET_DEVICE=cpu, and name 'lowkv' in VLLM_PLUGINS if that "
                    "is set")
