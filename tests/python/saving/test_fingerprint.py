"""A file goes to a model in which its keys mean the same, whatever else differs, and to no other."""

import contextlib
import copy
import json

import lowkv
import pytest
import torch
from families import build
from lowkv import saving
from saved import TOKENS, filled

SAYS_NOTHING = {
    "pad_token_id": 2, "eos_token_id": [2, 7], "bos_token_id": 5, "id2label": {0: "a"}, "problem_type": "x",
    "attention_dropout": 0.1, "resid_pdrop": 0.1, "initializer_range": 0.01, "keys_to_ignore_at_inference": [],
    "use_cache": False, "architectures": ["X"], "router_aux_loss_coef": 0.5, "output_router_logits": True,
    "pretraining_tp": 2, "_name_or_path": "elsewhere", "transformers_version": "5.0",
}


@pytest.fixture
def llama():
    return build("llama")[0]


@pytest.fixture
def path(llama, tmp_path):
    filled(llama).save(tmp_path / "prefix")
    return tmp_path / "prefix"


@pytest.mark.parametrize("name", SAYS_NOTHING)
def test_fields_that_say_nothing_of_keys(llama, path, name):
    setattr(llama.config, name, SAYS_NOTHING[name])
    assert lowkv.Cache.load(path, llama).get_seq_length() == TOKENS.shape[1]


def changed(model, change):
    change(model)
    return model


@torch.no_grad()
def weight(model):
    model.model.layers[1].self_attn.k_proj.weight += 0.01


def buffer(model):
    model.model.layers[0].register_buffer("zeros", torch.zeros(4))


def dtype(model):
    model.to(torch.bfloat16)


OTHERS = {
    "rope": (lambda model: model.config.rope_parameters.update(rope_theta=5e5), "configuration"),
    "eps": (lambda model: setattr(model.config, "rms_norm_eps", 1e-3), "configuration"),
    "positions": (lambda model: setattr(model.config, "max_position_embeddings", 4096), "configuration"),
    "a field of one's own": (lambda model: setattr(model.config, "mine", 1), "configuration"),
    "a weight": (weight, "weights"),
    "a buffer": (buffer, "weights"),
    "dtype": (dtype, "weights"),
}


@pytest.mark.parametrize("change,part", OTHERS.values(), ids=OTHERS.keys())
def test_what_keys_depend_on(llama, path, change, part):
    with pytest.raises(lowkv.Error, match=f"saved for another model, .*: other {part}$"):
        lowkv.Cache.load(path, changed(llama, change))


class Adapted(torch.nn.Module):
    """A layer with PEFT's attributes."""

    adapter_layer_names = ("lora_A",)

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = torch.nn.ModuleDict({name: torch.nn.Linear(base.in_features, base.out_features, bias=False)
                                           for name in "ab"})
        self.active_adapters, self.disable_adapters, self.merged_adapters = ["a"], False, []
        self.scaling = {"a": 1.0, "b": 1.0}

    def forward(self, x):
        out = self.base_layer(x)
        for name in () if self.disable_adapters else self.active_adapters:
            out = out + self.scaling[name] * self.lora_A[name](x)
        return out


@torch.no_grad()
def test_adapters_that_work(llama, tmp_path):
    torch.manual_seed(1)
    its = Adapted(llama.model.layers[0].self_attn.k_proj)
    llama.model.layers[0].self_attn.k_proj = its
    path = tmp_path / "prefix"
    filled(llama).save(path)

    def loads():
        with contextlib.suppress(lowkv.Error):
            return lowkv.Cache.load(path, llama).get_seq_length() > 0
        return False

    its.lora_A["b"].weight += 1
    its.scaling["b"] = 3.0
    assert loads()  # who does not work may change
    del its.lora_A["b"]
    assert loads()
    for name, other in (("active_adapters", ["b"]), ("disable_adapters", True), ("scaling", {"a": 2.0}),
                        ("merged_adapters", ["a"])):
        own = getattr(its, name)
        setattr(its, name, other)
        assert not loads(), name
        setattr(its, name, own)
    assert loads()
    its.lora_A["a"].weight += 0.1
    with pytest.raises(lowkv.Error, match=r"other weights$"):
        lowkv.Cache.load(path, llama)


@pytest.mark.parametrize("kind", ["LoraConfig", "IA3Config"])
def test_adapters_of_peft(llama, tmp_path, kind):
    peft = pytest.importorskip("peft")
    modules = ["k_proj", "v_proj", "down_proj"]
    arguments = {"init_lora_weights": False} if kind == "LoraConfig" else {"feedforward_modules": ["down_proj"]}
    config = getattr(peft, kind)(target_modules=modules, **arguments)
    wrapped = peft.get_peft_model(llama, config, adapter_name="a")
    wrapped.add_adapter("b", config)
    wrapped.set_adapter("a")
    base, path = wrapped.get_base_model(), tmp_path / "prefix"
    filled(base).save(path)
    assert lowkv.Cache.load(path, base).get_seq_length() == TOKENS.shape[1]
    wrapped.set_adapter("b")
    with pytest.raises(lowkv.Error, match=r"other weights and adapters$"):
        lowkv.Cache.load(path, base)
    with wrapped.disable_adapter(), pytest.raises(lowkv.Error, match=r"other weights and adapters$"):
        lowkv.Cache.load(path, base)
    wrapped.set_adapter("a")
    assert lowkv.Cache.load(path, base).get_seq_length() == TOKENS.shape[1]


@pytest.mark.filterwarnings("ignore")
def test_packed_weights_are_told_apart(llama, tmp_path):
    """They are no parameters."""
    other = changed(copy.deepcopy(llama), weight)
    models = [torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
              for model in (llama, other)]
    filled(models[0]).save(tmp_path / "prefix")
    assert lowkv.Cache.load(tmp_path / "prefix", models[0]).get_seq_length() == TOKENS.shape[1]
    with pytest.raises(lowkv.Error, match=r"other weights$"):
        lowkv.Cache.load(tmp_path / "prefix", models[1])


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_weights_of_torchao(llama, tmp_path, name):
    quantization = pytest.importorskip("torchao.quantization")
    other = changed(copy.deepcopy(llama), weight)
    for model in (llama, other):
        quantization.quantize_(model, getattr(quantization, name)())
    filled(llama).save(tmp_path / "prefix")
    assert lowkv.Cache.load(tmp_path / "prefix", llama).get_seq_length() == TOKENS.shape[1]
    with pytest.raises(lowkv.Error, match=r"other weights$"):
        lowkv.Cache.load(tmp_path / "prefix", other)


@pytest.mark.parametrize("where", ["disk", "cpu"])
def test_offloaded_weights_are_those_that_they_were(llama, path, tmp_path, where):
    accelerate = pytest.importorskip("accelerate")
    other = changed(copy.deepcopy(llama), weight)
    for number, model in enumerate((llama, other)):
        if where == "disk":
            accelerate.disk_offload(model, tmp_path / str(number), execution_device="cpu")
        else:
            accelerate.cpu_offload(model, execution_device="cpu")
        assert any(parameter.is_meta for parameter in model.parameters())
    assert lowkv.Cache.load(path, llama).get_seq_length() == TOKENS.shape[1]
    with pytest.raises(lowkv.Error, match=r"other weights$"):
        lowkv.Cache.load(path, other)


def test_what_has_no_values_is_refused_by_name(llama, path):
    empty = copy.deepcopy(llama).to("meta")
    with pytest.raises(lowkv.Error, match=r"the model's 'model.embed_tokens.weight' has no values"):
        lowkv.Cache.load(path, empty)
    llama.model.layers[0].get_extra_state = lambda: object()
    type(llama.model.layers[0]).get_extra_state = lambda self: object()
    try:
        with pytest.raises(lowkv.Error, match=r"'model.layers.0._extra_state' is a object, of which can't be said"):
            lowkv.Cache.load(path, llama)
    finally:
        del type(llama.model.layers[0]).get_extra_state


def test_positions_that_images_have_moved(llama, tmp_path):
    """A module keeps them for the conversation, as Qwen2-VL's, not the cache."""
    path = tmp_path / "prefix"
    llama.model.rope_deltas = torch.tensor([[-6], [-4]])
    filled(llama).save(path)
    llama.model.rope_deltas = None
    lowkv.Cache.load(path, llama)
    assert llama.model.rope_deltas.tolist() == [[-6], [-4]]
    llama.model.rope_deltas = None
    filled(llama).save(path)
    llama.model.rope_deltas = torch.tensor([[-6], [-4]])  # of another conversation
    lowkv.Cache.load(path, llama)
    assert llama.model.rope_deltas is None


def test_a_fingerprint_is_text_of_known_parts(llama):
    parts = saving.fingerprint(llama)
    assert list(parts) == ["class", "configuration", "weights", "adapters"] and json.dumps(parts)
    assert parts["class"] == "LlamaForCausalLM"
