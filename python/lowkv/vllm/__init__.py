"""lowkv's cache in vLLM on the CPU: packed pages in vLLM's own paged cache, attention in place (docs/vllm.md).

An engine that asks for a scheme, by `LOWKV_SCHEME=lowkv2.8` in the environment or by
`--additional-config '{"lowkv": {"scheme": "lowkv2.8"}}'`, keeps its cache so, or refuses to start and says why. Others
are vLLM's own."""

import os

VARIABLE = "LOWKV_SCHEME"
VERSIONS = ("0.32.0",)  # of vLLM, tested
PLATFORM = "lowkv.vllm.platform.Platform"
STOCK = "vllm.platforms.cpu.CpuPlatform"  # what it is made of


def tested(version: str) -> bool:
    return version.split("+")[0] in VERSIONS


def platform() -> str | None:
    """vLLM's entry point `vllm.platform_plugins`: the class that is the platform, or None.

    vLLM asks before it has a configuration, so lowkv's class, which does what vLLM's own does until an engine asks for
    a scheme, takes its place wherever it can. Where it can't it is silent, unless the environment names a scheme: what
    is wrong is then said when the class is imported, since vLLM takes an exception here for "not this platform"."""
    return PLATFORM if os.environ.get(VARIABLE) or _can_stand_in() else None


def _can_stand_in() -> bool:
    """Whether vLLM is a tested one and would take its CPU platform."""
    import vllm
    from vllm.platforms import PLATFORM_PLUGINS_GROUP, builtin_platform_plugins
    from vllm.plugins import load_plugins_by_group

    if not tested(vllm.__version__):
        return False
    others = {name: ask for name, ask in load_plugins_by_group(PLATFORM_PLUGINS_GROUP).items() if ask is not platform}
    return [path for ask in (*builtin_platform_plugins.values(), *others.values()) if (path := ask())] == [STOCK]


def require() -> None:
    """vLLM's entry point `vllm.general_plugins`, called in each of its processes: raises Error where the environment
    names a scheme and vLLM has another platform, with which it would serve its own cache."""
    if not os.environ.get(VARIABLE):
        return
    from vllm.platforms import current_platform

    from lowkv.vllm.platform import Platform

    if not isinstance(current_platform, Platform):
        from lowkv import Error

        raise Error(f"{VARIABLE} is set, but vLLM's platform is {type(current_platform).__name__}: vLLM takes no "
                    "platform from a plug-in while VLLM_TARGET_DEVICE=cpu is set, or where VLLM_PLUGINS leaves out "
                    "'lowkv'")
