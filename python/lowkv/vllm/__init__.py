"""lowkv's cache in vLLM on the CPU: packed pages in vLLM's own paged cache, attention in place (docs/vllm.md).

Installed, it does nothing. With `LOWKV_SCHEME=lowkv2.8` (or another scheme) in the environment every engine of the
process keeps its cache so, or refuses to start and says why."""

import os

VARIABLE = "LOWKV_SCHEME"
PLATFORM = "lowkv.vllm.platform.Platform"


def platform() -> str | None:
    """vLLM's entry point `vllm.platform_plugins`: the class that is the platform, or None where nobody asks.

    vLLM takes an exception here for "not this platform": what is wrong is said when the class is imported."""
    return PLATFORM if os.environ.get(VARIABLE) else None


def require() -> None:
    """vLLM's entry point `vllm.general_plugins`, called in each of its processes: raises Error where a scheme was
    asked for and vLLM has another platform, with which it would serve its own cache."""
    if not os.environ.get(VARIABLE):
        return
    from vllm.platforms import current_platform

    from lowkv.vllm.platform import Platform

    if not isinstance(current_platform, Platform):
        from lowkv import Error

        raise Error(f"{VARIABLE} is set, but vLLM's platform is {type(current_platform).__name__}: vLLM takes no "
                    "platform from a plug-in while VLLM_TARGET_DEVICE=cpu is set, or where VLLM_PLUGINS leaves out "
                    "'lowkv'")
