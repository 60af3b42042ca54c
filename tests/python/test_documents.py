"""The Python in README.md and docs/transformers.md runs as it stands, on the model that the set-up fetched."""

import os
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
MODEL = Path(os.environ["LOWKV_MODEL"]) if "LOWKV_MODEL" in os.environ else None


@pytest.mark.long
@pytest.mark.skipif(MODEL is None, reason="LOWKV_MODEL is not set; make test-python does")
@pytest.mark.parametrize("page", ["README.md", "docs/transformers.md"])
def test_the_snippets_run(page, tmp_path, monkeypatch):
    """No network here: the model that the page names is read from the file instead."""
    snippets = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert snippets
    for kind in (AutoModelForCausalLM, AutoTokenizer):
        def from_file(name, own=kind.from_pretrained, more={} if kind is AutoTokenizer else {"dtype": torch.float32}):
            return own(MODEL.parent, gguf_file=MODEL.name, **more)

        monkeypatch.setattr(kind, "from_pretrained", from_file)
    monkeypatch.chdir(tmp_path)
    names = {}
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), names)
