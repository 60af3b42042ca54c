"""Makes a model call lowkv's attention function, or says why it can't."""

from __future__ import annotations

import inspect
import sys

import torch
import transformers
from transformers import PreTrainedModel

from lowkv import adapters
from lowkv._core import Error
from lowkv.masks import NAME

ATTENTION = ("full_attention", "sliding_attention")
_STATES = ("linear_attention", "conv", "hybrid")  # layers with states of their own; hybrid ones attend, too
_NOTHING = ("moe", "mlp")
# Hybrid models that can't be served, by their model_type.
_OTHER_STATES = {"recurrent_gemma": "keeps its recurrent states in the model, not in a cache",
                 "minimax": "needs a cache of a class of its own"}


class Switched(str):
    """A switched model's attn_implementation. Unpickling it imports this module: the model, or a part of it, finds the
    attention function registered in another process, too. stock: the attn_implementation that it had."""

    stock: str


def install(model: PreTrainedModel) -> None:
    """Switches `model` to lowkv's attention. With other caches, or none, it goes on as stock sdpa or eager
    attention does. Doing it again changes nothing. Raises Error for a model that can't be served."""
    config = _text_config(model)
    attention = _attention(model)
    for head_dim in {getattr(module, "head_dim", None) for module in attention} - {None}:
        if head_dim % 16 and not getattr(config, "kv_lora_rank", None):
            raise Error(f"{type(model).__name__} has heads of {head_dim} channels; lowkv serves multiples of 16")
    if adapters.adapt(model):
        return
    if not _goes_through_the_interface(model):
        raise Error(f"{type(model).__name__} ({config.model_type}) computes its attention itself, and lowkv has no "
                    "adapter for it; use the model's own cache. docs/transformers/families.md lists what works")
    if not model.can_generate() and not any(getattr(module, "is_causal", True) for module in attention):
        raise Error(f"{type(model).__name__} is no decoder: it has no cache to be packed")
    if config._attn_implementation != NAME:
        name = Switched(NAME)
        name.stock = config._attn_implementation
        config._attn_implementation_internal = name  # the property switches a multimodal model's towers, too


def uninstall(model: PreTrainedModel) -> None:
    """Gives `model` the attention back that it had before install(). Nothing where that was not called."""
    adapters.restore(model)
    config = _text_config(model)
    if config._attn_implementation == NAME:
        config._attn_implementation_internal = getattr(config._attn_implementation, "stock", "sdpa")


def installed(model: PreTrainedModel) -> bool:
    """Whether the model calls lowkv's attention through transformers' AttentionInterface."""
    return _text_config(model)._attn_implementation == NAME


def sliding_windows(model: PreTrainedModel) -> list[int | None]:
    """Each layer's sliding window in tokens, or None."""
    config = _text_config(model)
    if model.config.is_encoder_decoder:
        raise Error(f"{type(model).__name__} has an encoder and a decoder; lowkv serves decoder-only models")
    try:
        key_channels = getattr(config, "qk_nope_head_dim", 0) + getattr(config, "qk_rope_head_dim", 0)
        latent = getattr(config, "kv_lora_rank", None) and key_channels != getattr(config, "v_head_dim", None)
    except RuntimeError:  # transformers' for layers that differ in these
        latent = True
    if latent:
        raise Error(f"{type(model).__name__} has multi-head latent attention (MLA), which lowkv does not serve")
    if getattr(config, "cross_attention_layers", None):
        raise Error(f"{type(model).__name__} has layers that attend to images alone; lowkv does not serve that")
    if getattr(config, "n_recurrent_loops", 1) > 1:
        raise Error(f"{type(model).__name__} goes through some layers several times, with a cache for each; lowkv does "
                    "not serve that")
    if getattr(config, "num_kv_shared_layers", 0):
        raise Error(f"{type(model).__name__} shares keys and values between layers; lowkv does not serve that")
    if config.model_type in ("moshi", "kyutai_speech_to_text"):
        raise Error(f"{type(model).__name__} has a sliding_window that its masks do not follow; "
                    "lowkv does not serve it")
    window = getattr(config, "sliding_window", None)
    types = layer_types(model)
    if types is None and not hasattr(config, "num_hidden_layers"):
        raise Error(f"{type(model).__name__} is no decoder: it has no cache to be packed")
    if types is None:
        return [window] * config.num_hidden_layers
    return [window if t == "sliding_attention" else None for t in types]


def layer_types(model: PreTrainedModel) -> list[str] | None:
    """Each layer's type, as transformers names it, or None where all layers are alike."""
    config, name = _text_config(model), type(model).__name__
    types = getattr(config, "layer_types", getattr(config, "layers_block_type", None))  # transformers 5.4: Jamba's
    if types is None or set(types) <= set(ATTENTION):
        return types
    other = sorted(set(types) - {*ATTENTION, *_STATES, *_NOTHING})
    if other:
        raise Error(f"{name} has layers of type {', '.join(other)}; lowkv serves {', '.join(ATTENTION)} and, beside "
                    f"these, {', '.join(_STATES)}")
    if config.model_type in _OTHER_STATES:
        raise Error(f"{name} {_OTHER_STATES[config.model_type]}; lowkv does not serve it")
    if set(types) <= {*_STATES, *_NOTHING} - {"hybrid"}:
        raise Error(f"{name} has no attention layers, whose keys and values lowkv packs; use the model's own cache")
    if getattr(config, "kv_lora_rank", None):
        raise Error(f"{name} has multi-head latent attention (MLA), which lowkv does not serve")
    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < (5, 23):
        raise Error(f"{name} has layers of type {', '.join(sorted(set(types)))}; with transformers {version} lowkv "
                    f"serves {' and '.join(ATTENTION)}, with 5.23 and newer hybrid models, too")
    return types


def _text_config(model: PreTrainedModel):
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        raise Error(f"from_model() takes a transformers model, not {type(model).__name__}: give and call "
                    "model.get_base_model(), which has PEFT's adapters in it (but for prefix and prompt tuning, which "
                    "are not served)")
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise Error("from_model() takes a model that is not compiled: torch.compile with a lowkv cache is not served")
    if not isinstance(model, PreTrainedModel):
        raise Error(f"from_model() takes a transformers model, not {type(model).__name__}")
    return model.config.get_text_config(decoder=True)


def _attention(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The decoder's: a vision tower's layers have no numbers."""
    return [module for module in model.modules()
            if hasattr(module, "layer_idx") and "Attention" in type(module).__name__]


def _goes_through_the_interface(model: PreTrainedModel) -> bool:
    # What calls the interface has this name from transformers; Layer's tripwire stops what has it and does not.
    # A vision tower may call it where the text decoder does not, as GIT's.
    name = "ALL_ATTENTION_FUNCTIONS"
    attention = {type(module) for module in _attention(model)}
    if attention:
        found = [(parent, inspect.unwrap(vars(parent)["forward"])) for kind in attention for parent in kind.__mro__
                 if "forward" in vars(parent) and parent is not torch.nn.Module]
        # One from elsewhere was put in its place, and may call the one that was there.
        return any(name in forward.__code__.co_names or forward.__module__ != parent.__module__
                   for parent, forward in found)
    return any(hasattr(sys.modules[type(module).__module__], name) for module in model.modules())
