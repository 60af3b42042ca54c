"""eval/layer_budget.py: the choice against all choices there are and against what `lowkv budget` chose, in corners, and
the whole search on a command that is not there."""

import itertools
import json
import random
from pathlib import Path

import layer_budget as budget
import pytest
from paths import ROOT

# What `lowkv budget` of commit a0e1fdf measured on SmolLM2, and chose.
RECORDED = json.loads((ROOT / "docs/quality/layers.json").read_text())
RATIO = [1, 0.4, 0.1]
STEPS = [0, 1, 2]  # bits that a rung adds
LADDER = ["lowkv2", "lowkv3", "lowkv4"]
NAN = float("nan")


def rungs_of(sensitivity, target, ratio=RATIO):
    """With elements of one layer each."""
    n = len(sensitivity)
    return budget.choose(sensitivity, ratio, [[bits / n for bits in STEPS]] * n, target - 2)


def test_the_recorded_measurements_lead_to_the_recorded_choice():
    layers, ladder = RECORDED["layers"], RECORDED["ladder"]
    losses = [max(rung["mean_kld"] - RECORDED["floor"], 0) for rung in ladder]
    ratio = budget.steady_ratio(losses)
    assert ratio == pytest.approx([rung["ratio"] for rung in ladder])
    sensitivity = budget.shrunk([layer["mean_kld"] - layer["floor"] for layer in layers],
                                [layer["sensitivity_error"] for layer in layers])
    assert sensitivity == pytest.approx([layer["sensitivity"] for layer in layers])
    share = layers[0]["elements_per_token"] / sum(layer["elements_per_token"] for layer in layers)
    added = [[share * (rung["bits"] - ladder[0]["bits"]) for rung in ladder]] * len(layers)
    rungs = budget.choose(sensitivity, ratio, added, RECORDED["target_bits"] - ladder[0]["bits"])
    assert [ladder[rung]["scheme"] for rung in rungs] == [layer["scheme"] for layer in layers]
    chosen = RECORDED["chosen"]
    assert budget.expected_loss(sensitivity, ratio, rungs) == pytest.approx(chosen["expected_kld"])
    names = [rung["scheme"] for rung in ladder]
    assert budget.scheme_of(names, rungs, [True] * len(layers)) == chosen["scheme"]


def test_a_choice_fits_and_no_other_one_of_as_many_bits_loses_less():
    source = random.Random(1)
    for _ in range(20):
        sensitivity = [source.uniform(0.01, 1) for _ in range(5)]
        before = [0] * 5
        for tenths in range(20, 41):
            rungs = rungs_of(sensitivity, tenths / 10)
            bits = 2 + sum(STEPS[rung] for rung in rungs) / 5
            assert bits <= tenths / 10 + 1e-9
            assert all(new >= old for new, old in zip(rungs, before, strict=True))  # never lowered
            before = rungs
            loss = budget.expected_loss(sensitivity, RATIO, rungs)
            for other in itertools.product(range(3), repeat=5):
                if 2 + sum(STEPS[rung] for rung in other) / 5 <= bits + 1e-9:
                    assert budget.expected_loss(sensitivity, RATIO, other) >= loss - 1e-12
        assert before == [2] * 5


def test_targets_out_of_reach_ties_and_nothing_to_gain():
    assert [rungs_of([0.5], target) for target in (1, 3, 99)] == [[0], [1], [2]]
    assert rungs_of([1, 1, 1], 2.5) == [1, 0, 0]  # of equals the first
    assert rungs_of([1, 1, 1], 2 + 1 / 3) == [1, 0, 0]  # a sum's last digits don't count
    assert rungs_of([0, 0], 4) == [0, 0]
    assert rungs_of([1, 1], 3, ratio=[1, 1, 0.1]) == [2, 0]  # a rung that is no better is passed over
    assert rungs_of([NAN, 1], 3) == [0, 2] and rungs_of([1, NAN], 3) == [2, 0]


def test_layers_weigh_by_what_they_store():
    added = [[0, 3 / 4, 6 / 4], [0, 0, 0], [0, 1 / 4, 2 / 4]]  # the second keeps no keys and values
    assert budget.choose([1, 1, 1], RATIO, added, 0.5) == [0, 0, 2]
    keeps = [True, False, True]
    assert budget.scheme_of(LADDER, [0, 0, 1], keeps) == "lowkv2,layer.2=lowkv3"
    assert budget.scheme_of(LADDER, [1, 0, 1], keeps) == "lowkv3"  # it joins its neighbours


def test_the_shortest_text_of_a_choice():
    for rungs, text in (([0, 0, 0, 0], "lowkv2"), ([1, 0, 0, 0], "lowkv2,layer.0=lowkv3"),
                        ([1, 1, 1, 0], "lowkv3,layer.3=lowkv2"), ([2], "lowkv4"),
                        ([0, 1, 1, 2], "lowkv3,layer.0=lowkv2,layer.3=lowkv4"),
                        ([1, 2, 2, 1], "lowkv3,layer.1-2=lowkv4")):
        assert budget.scheme_of(LADDER, rungs, [True] * len(rungs)) == text
    spelled = ["lowkv2", "k=channel-3-g32,v=token-3-g32"]
    assert budget.scheme_of(spelled, [0, 0, 1], [True] * 3, ["window=32"]) == (
        "lowkv2,window=32,layer.2=channel-3-g32/token-3-g32")


def test_ratios_never_rise_and_losses_that_cannot_be_told_apart_become_alike():
    assert budget.steady_ratio([2, 1, 1.5, -1]) == [1, 0.5, 0.5, 0]
    assert budget.steady_ratio([1, 3]) == [1, 1] and budget.steady_ratio([0, 0]) == [1, 1]
    assert budget.shrunk([1, 2, 3], [0, 0, 0]) == [1, 2, 3]
    assert budget.shrunk([1, 2, 3], [9, 9, 9]) == [2, 2, 2]
    mixed = budget.shrunk([1, 2, 3], [0.5, 0.5, 0.5])
    assert 1 < mixed[0] < mixed[1] < mixed[2] < 3
    assert budget.shrunk([5], [1]) == [5] and budget.shrunk([-5], [1]) == [0]


def test_a_saving_is_sure_beyond_twice_its_error():
    assert budget.is_sure({"mean_kld": 0.3, "error": 0.1})
    for mean, error in ((0.1, 0.1), (-1, 0.1), (NAN, NAN)):
        assert not budget.is_sure({"mean_kld": mean, "error": error})
    assert not budget.is_sure(None)


def test_the_floor_is_the_lowest_rung_in_8_bits():
    presets = {"lowkv2": {"keys": "sorted-4211-head-trellis-2rows-weighted",
                          "values": "token-2-head-trellis-hadamard-unbiased-e5m3"}}
    assert budget.codecs("lowkv2", presets) == tuple(presets["lowkv2"].values())
    assert budget.codecs("lowkv2,v=exact", presets)[1] == "exact"
    for codec, quiet in ((presets["lowkv2"]["keys"], "token-8-head-hadamard-mean"), ("exact", "exact"),
                         (presets["lowkv2"]["values"], "token-8-head-hadamard"), ("channel-2-g32", "channel-8-g32"),
                         ("token-3-head-normal-hadamard-mean-lsq-fp8", "token-8-head-hadamard-mean-fp8")):
        assert budget.in_8_bits(codec) == quiet


BITS = {"lowkv2": 2.25, "lowkv3": 3.25, "exact": 16, "k": 8.5}
LOSS, WEIGHTS = {"lowkv2": 1, "lowkv3": 0.2}, (1, 0, 2, 9)


class Command(budget.Command):
    """A model of four layers, of which the second keeps nothing; the last one loses most."""

    def __init__(self, args, tokens=10**6):
        super().__init__(args)
        self.tokens, self.read = tokens, []

    def layers(self, scheme):
        base, found = scheme.split(",")[0], []
        words = dict(word.split("=") for word in scheme.split(",")[1:])
        for layer in range(4):
            spans = [name for name in words if name.startswith("layer.") and
                     int(name[6:].split("-")[0]) <= layer <= int(name[6:].split("-")[-1])]
            found.append((words[spans[-1]] if spans else base).split("=")[0].split("/")[0])
        return ["k" if name.startswith("token-8") else name for name in found]

    def ask(self, subcommand, *words):
        told = dict(zip(words[::2], words[1::2], strict=False))
        schemes = [scheme.replace("+", ",") for scheme in told.get("--schemes", "").split(",")]
        if subcommand == "schemes":
            return {"presets": [{"name": "lowkv2", "keys": "sorted-4211-head", "values": "token-2-head-trellis"}]}
        if subcommand == "plan":
            rows = [{"bits_per_element": sum(BITS[name] for n, name in enumerate(self.layers(s)) if n != 1) / 3}
                    for s in schemes]
            return {"rows": [{}, *rows], "layers": [{}] * 4}
        text = Path(told["-f"]).read_text()
        if len(text.split()) < self.tokens:
            raise budget.Failure(f"the text has 7 tokens: {budget.TOO_SHORT}, or fewer --tokens")
        self.read.append(text)
        rows = []
        for scheme in ["exact", *schemes]:
            loss = sum(weight * LOSS.get(name, 0.01) for weight, name in
                       zip(WEIGHTS, self.layers(scheme), strict=True) if name != "exact") / 100
            klds = [loss * (0.9 + 0.2 * (i % 2)) for i in range(100)]
            mean, error = budget.estimate(klds)
            rows.append({"scheme": scheme, "klds": klds, "mean_kld": mean, "mean_kld_error": error,
                         "perplexity": 9 + loss, "perplexity_change_percent": loss, "nothing_packed": False})
        return {"model": "four layers", "tokens": 768, "chunk": 64, "skip": 384, "positions": 100, "rows": rows}


def search(tmp_path, text, *words, tokens=1):
    file = tmp_path / "text"
    file.write_text(text)
    args = budget.arguments(["-m", "model", "-f", str(file), "--ladder", "lowkv2,lowkv3", *words])
    command = Command(args, tokens)
    return budget.search(command, args, text), command


def test_the_layer_that_loses_most_is_raised(tmp_path):
    found, command = search(tmp_path, "one two", "--target-bits", "2.6", "--window", "32")
    chosen = found["chosen"]
    assert chosen["scheme"] == found["recommended"] == "lowkv2,window=32,layer.3=lowkv3"
    assert chosen["bits"] == pytest.approx(2.25 + 1 / 3)
    assert found["layers"][1] == {"layer": 1} and found["layers"][3]["scheme"] == "lowkv3"
    assert [row["chosen"] for row in found["verification"]["rows"]] == [False, True, False]
    assert found["verification"]["other_text"] and command.read[0] == "one" and command.read[-1] == " two"
    shown = budget.report(found)
    assert "| 1 | keeps no keys and values |" in shown and "was not made on" in shown


def test_a_short_text_is_measured_and_verified_alike(tmp_path):
    found, command = search(tmp_path, "one two", "--target-bits", "2.6", tokens=2)
    assert not found["verification"]["other_text"] and set(command.read) == {"one two"}
    assert "which flatters it" in budget.report(found)
    with pytest.raises(budget.Failure, match="the text has 7 tokens"):
        search(tmp_path, "one two", "--target-bits", "2.6", tokens=3)


def test_a_rung_may_be_exact_and_the_lowest_one_the_choice(tmp_path):
    found, _ = search(tmp_path, "one two", "--target-bits", "8", "--ladder", "lowkv2,exact")
    assert found["chosen"]["scheme"] == "lowkv2,layer.3=exact"
    found, _ = search(tmp_path, "one two", "--target-bits", "2.3")
    assert found["recommended"] == found["chosen"]["scheme"] == "lowkv2"
    assert found["verification"]["saved_against_below"] is None


@pytest.mark.parametrize("words, says", [
    (["--target-bits", "2.2"], "from 2.2500 bits (lowkv2 for all layers) to 3.2500 (lowkv3)"),
    (["--target-bits", "3.4"], "is out of reach"),
    (["--target-bits", "3", "--ladder", "lowkv3,lowkv2"], "must ascend in bits: lowkv3 has 3.2500, lowkv2 has 2.2500"),
    ([], "-b/--target-bits"),
    (["--target-bits", "3", "--tokens", "500"], "513 are needed"),
    (["--target-bits", "3", "--ladder", "lowkv2"], "two schemes or more"),
    (["--target-bits", "3", "--ladder", "exact,lowkv2"], "the lowest rung is exact"),
    (["--target-bits", "3", "--ladder", "lowkv2,lowkv4+window=32"], "--window, --sinks and --flush are for all layers"),
    (["--target-bits", "3", "--ladder", "lowkv2,lowkv4+layer.0=kivi2"], "how one layer is stored"),
])
def test_wrong_arguments_say_what_is_right(tmp_path, capsys, words, says):
    try:
        search(tmp_path, "one two", *words)
        said = ""
    except budget.Failure as failure:
        said = str(failure)
    except SystemExit:
        said = capsys.readouterr().err
    assert says in said


def test_what_is_read_is_not_overwritten(tmp_path, capsys):
    file = tmp_path / "text"
    with pytest.raises(SystemExit):
        budget.arguments(["-m", "model", "-f", str(file), "-b", "2.5", "--json", str(file)])
    assert "it is what is read" in capsys.readouterr().err


def test_positions_are_counted_where_every_rung_has_packed_a_block():
    def skip(*words):
        return budget.arguments(["-m", "m", "-f", "f", "-b", "3", *words]).skip
    assert skip() == 384 and skip("--window", "32", "--sinks", "5") == 320 and skip("--sinks", "0") == 256
    assert skip("--flush", "512") == 640 and skip("--window", "100", "--chunk", "1") == 356
