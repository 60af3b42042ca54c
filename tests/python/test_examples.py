"""The scripts in examples/python run, on a tiny model with the tokenizer of the one that the set-up fetched."""

import os
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "python"
MODEL = Path(os.environ["LOWKV_MODEL"]) if "LOWKV_MODEL" in os.environ else None
# A line that each prints at its end.
LAST = {
    "generate": r"\d+ tokens of 1 sequence: \d+ bytes exact, \d+ packed",
    "own_loop": r"0 tokens after reset\(\)",
    "padded_batch": r"- In the year 1969, the first.*",
    "prefix": r"3 forks hold \d+ bytes of packed blocks of their own",
    "saved_prefix": r"refused: .* was saved with scheme lowkv4, not kivi2",
    "quantize_arrays": r"values: worst error \d\.\d+, worst scale \d\.\d+",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    if MODEL is None:
        pytest.skip("LOWKV_MODEL is not set; make test-python does")
    folder = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(MODEL.parent, gguf_file=MODEL.name)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=2)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_all_are_run():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(LAST)


@pytest.mark.parametrize("name", LAST)
def test_it_runs(name, model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, str(model)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        runpy.run_path(str(FOLDER / f"{name}.py"))
    written = capsys.readouterr()
    lines = written.out.strip().splitlines()
    assert "deprecated" not in written.err
    assert any(re.fullmatch(LAST[name], line) for line in lines), lines
    if name == "saved_prefix":
        assert "equal: True" in lines
