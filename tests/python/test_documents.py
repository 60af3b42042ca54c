"""The Python in README.md and in the pages on transformers runs as it stands, on the model that the set-up fetched."""

import os
import re
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
MODEL = Path(os.environ["LOWKV_MODEL"]) if "LOWKV_MODEL" in os.environ else None


@pytest.mark.long
@pytest.mark.skipif(MODEL is None, reason="LOWKV_MODEL is not set; make test-python does")
@pytest.mark.parametrize("pages", [["README.md"], ["docs/transformers.md", "docs/transformers/exact.md",
                                                    "docs/transformers/processes.md"]])
def test_the_snippets_run(pages, tmp_path, monkeypatch, capfd):
    """No network here: the model that the page names is read from the file instead."""
    snippets = [re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
                for page in pages]
    assert all(snippets)
    for kind in (AutoModelForCausalLM, AutoTokenizer):
        def from_file(name, own=kind.from_pretrained, more={} if kind is AutoTokenizer else {"dtype": torch.float32}):
            return own(MODEL.parent, gguf_file=MODEL.name, **more)

        monkeypatch.setattr(kind, "from_pretrained", from_file)
    monkeypatch.chdir(tmp_path)
    names = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        for page, found in zip(pages, snippets, strict=True):
            for snippet in found:
                exec(compile(snippet, page, "exec"), names)
    assert "deprecated" not in capfd.readouterr().err
