"""Schemes that need a calibration, through the plug-in: SKVQ and KVQuant on the real model."""

import json
import re

import plugin_models as models
import pytest
from plugin_tools import MODEL, PATHS, TOOLS, complete
from test_calibrate import lowkv, read_tensors, write_tensors

pytestmark = pytest.mark.long  # each calibrates the real model

# Bytes of a token's 30 layers of 192 channels, once packed, and the most that may be lost (mean KLD
# on 256 positions; docs/quality.md has .25 and .027 on longer texts).
SCHEMES = {"skvq-k2v2": (3360, 0.6), "kvquant3-1%": (5160, 0.1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("calibrated")


@pytest.fixture(scope="module")
def calibrations(folder):
    made = {}
    for scheme in SCHEMES:
        made[scheme] = folder / f"{scheme}.safetensors"
        run = lowkv("calibrate", "-m", MODEL, "--text", PATHS["LOWKV_DEMO_TEXT"], "--scheme", scheme, "--tokens", 512,
                    "--context", 512, "-o", made[scheme])
        assert run.code == 0, run.both
    return made


@pytest.mark.parametrize("scheme", SCHEMES)
def test_stock_llama_cpp_packs_them_also_when_the_context_shifts(calibrations, scheme):
    both = ":".join(map(str, calibrations.values()))
    run = complete("-c", 512, "--context-shift", tokens=600, scheme=scheme,
                   env={"LOWKV_CALIBRATION": both, "LOWKV_VERBOSE": "1"})
    assert run.code == 0
    line = run.said(r"lowkv: active: scheme (\S+), 30 layers, 23040 -> (\d+) bytes per token")
    assert line.group(1) == scheme and int(line.group(2)) == SCHEMES[scheme][0]
    packed = run.said(r"lowkv: cache freed: .*cells packed (\d+)")
    assert int(packed.group(1)) >= 128


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_loss_is_what_it_should_be(calibrations, folder, scheme):
    file = folder / "compare.json"
    run = lowkv("compare", "-m", MODEL, "-f", PATHS["LOWKV_HANDBOOK_TEXT"], "--tokens", 512, "--chunk", 32,
                "--no-speed", "--stock", "none", "--calibration", calibrations[scheme], "--schemes", scheme,
                "--json", file)
    assert run.code == 0, run.both
    row = json.loads(file.read_text())["rows"][1]
    assert 1e-4 < row["mean_kld"] < SCHEMES[scheme][1]


def test_without_their_calibration_they_are_refused(calibrations):
    run = complete(tokens=2, scheme="skvq-k4v4")
    assert run.code != 0
    run.said(r"LOWKV_SCHEME=skvq-k4v4 can't be used: skvq-k4v4 needs a calibration of the model: make one with "
             r"lowkv calibrate, and name it in LOWKV_CALIBRATION\n")
    run = lowkv("generate", "-m", MODEL, "-p", "abc", "-n", 1, "--scheme", "kvquant3-1%")
    assert run.code == 1 and "calibrate, and name it in --calibration or LOWKV_CALIBRATION\n" in run.err, run.both
    assert "is not a scheme" not in run.both
    run = complete(tokens=2, scheme="skvq-k4v4", env={"LOWKV_CALIBRATION": str(calibrations["skvq-k2v2"])})
    assert run.code != 0
    run.said(r"skvq-k4v4 needs a calibration.*skvq-k2v2")
    run = complete(tokens=2, scheme="lowkv2.8", env={"LOWKV_CALIBRATION": "/nowhere.safetensors"})
    assert run.code != 0
    run.said(r"LOWKV_CALIBRATION: .*/nowhere.safetensors")


def test_another_models_calibration_is_refused(calibrations, folder):
    other = models.llama(folder / "other.gguf")
    run = lowkv("generate", "-m", other, "-p", "abc", "-n", 2, "--scheme", "skvq-k2v2",
                "--calibration", calibrations["skvq-k2v2"])
    assert run.code != 0
    run.said(r"skvq-k2v2.safetensors")


def test_a_calibration_of_another_shape_is_one_message(calibrations, folder):
    env = {"LOWKV_CALIBRATION": str(calibrations["skvq-k2v2"])}
    shapes = {"other": {}, "long": {"heads": 3, "kv_heads": 3, "layers": 33}}
    whys = {"other": "3 kv heads of 64 channels; this model has 2 kv heads of 64 channels",
            "long": "a model of 30 layers; this one has more"}
    for name, shape in shapes.items():
        model = models.llama(folder / f"{name}-shape.gguf", **({"layers": 6} | shape))
        run = complete(tokens=2, scheme="skvq-k2v2", model=model, env=env)
        said = re.findall(r"lowkv: NOT active for (\d+) of \d+ layers, which stay f16: (.*)", run.both)
        assert said == [("6" if name == "other" else "3", f"the calibration was made for {whys[name]}")], run.both


def test_the_command_checks_what_the_environment_names(calibrations, folder):
    """For schemes that need it, and in the words of the file; the plug-in's own variables are not the command's."""
    def generate(path, scheme="skvq-k2v2"):
        return lowkv("generate", "-m", MODEL, "-p", "abc", "-n", 1, "--scheme", scheme,
                     LOWKV_CALIBRATION=str(path))

    assert generate(calibrations["skvq-k2v2"]).code == 0
    run = generate("/nowhere.safetensors")
    assert run.code == 1 and "LOWKV_CALIBRATION: /nowhere.safetensors: there is no such file" in run.err
    assert generate("/nowhere.safetensors", "lowkv2").code == 0
    data = calibrations["skvq-k2v2"].read_bytes()
    damaged = folder / "damaged.safetensors"
    damaged.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    run = generate(damaged)
    assert run.code == 1 and "it is damaged: its contents do not match their hash" in run.err
    said, arrays = read_tensors(calibrations["skvq-k2v2"])
    other = folder / "renamed.safetensors"
    write_tensors(other, {k: v for k, v in said.items() if k != "hash"} | {"model": "another"}, arrays)
    run = generate(other)
    assert run.code == 1 and "was made for another model: another" in run.err
    for named in ({"LOWKV_CALIBRATION": str(other)}, {}):
        given = () if named else ("--calibration", other)
        run = lowkv("run", "--scheme", "skvq-k2v2", *given, "--", TOOLS / "llama-completion", "-m", MODEL, "-p", "abc",
                    "-n", 1, "-no-cnv", **named)
        assert run.code == 1 and "was made for another model: another" in run.err, run.both
        assert len(run.both.strip().splitlines()) == 1, run.both  # nothing was started
    run = lowkv("calibrate", "-m", MODEL, "--text", PATHS["LOWKV_DEMO_TEXT"], "--scheme", "kvquant2", "--tokens", 256,
                "--context", 256, "-o", folder / "k.safetensors",
                LOWKV_SCHEME="bogus", LOWKV_CALIBRATION="/nowhere.safetensors")
    assert run.code == 0, run.both
