"""Models whose last layer drafts (MTP): its cache is one of its own, and so is packed like the model's."""

import re
from functools import partial

import pytest
from models.delta import qwen35
from models.experts import glm4moe
from plugin_tools import server, text
from test_plugin_assistant import DRAFTED
from test_plugin_operations import CONTEXT, ask_for, assert_same_answers

MODELS = {"qwen35": partial(qwen35, drafts=1), "glm4moe": glm4moe}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    return MODELS[request.param](tmp_path_factory.mktemp("mtp") / f"{request.param}.gguf")


def draft(folder, model, scheme):
    """The answers, whose texts are given, so that nearly all drafts are rolled back; the drafts; the log."""
    with server(folder, *CONTEXT, "-np", 1, "--spec-type", "draft-mtp", "--spec-draft-n-max", 3, "-v",
                scheme=scheme, model=model) as s:
        answers = [ask_for(s, text(i, 300 + 200 * i), text(50 + i, 24)) for i in range(3)]
    assert all(a["timings"]["draft_n"] > 20 for a in answers)
    return answers, re.findall(DRAFTED, s.log_text()), s.log_text()


@pytest.fixture(scope="module")
def exact(model, tmp_path_factory):
    return draft(tmp_path_factory.mktemp("exact"), model, "exact")


def test_it_drafts_as_by_stock(tmp_path, model, exact):
    answers, drafted, _ = draft(tmp_path, model, None)
    ours, our_drafts, log = exact
    assert log.count("lowkv: active: scheme exact") == 2 and "NOT active" not in log
    assert_same_answers(ours, answers)
    assert len(our_drafts) == len(drafted) > 60
    assert sum(a == b for (a, _), (b, _) in zip(drafted, our_drafts, strict=True)) > 0.9 * len(drafted)


def test_its_drafts_read_packed_rows(tmp_path, model, exact):
    """8 bits lose little, so that what is read in the wrong place shows."""
    answers, drafted, log = draft(tmp_path, model, "int8,window=32,sinks=0")
    assert log.count("lowkv: active: scheme int8") == 2 and "NOT active" not in log
    assert_same_answers(answers, exact[0])
    assert len(drafted) == len(exact[1])
    assert sum(a == b for (a, _), (b, _) in zip(drafted, exact[1], strict=True)) > 0.9 * len(drafted)
