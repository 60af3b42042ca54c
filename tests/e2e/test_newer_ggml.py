"""A program whose ggml has a number that lowkv does not know. What else may differ: tests/matrix/test_trial.py."""

import shutil

from plugin_tools import MODEL, PATHS, TOOLS
from test_command import lowkv

ASK = ("-m", MODEL, "-p", "Once upon a time", "-n", 8, "-no-cnv", "--temp", 0, "-t", 1)


def test_it_is_tried_once_and_served(tmp_path):
    libraries = tmp_path / "lib"
    libraries.mkdir()
    for file in TOOLS.glob("lib*.so*"):
        shutil.copy(file, libraries, follow_symlinks=False)
    base = (libraries / "libggml-base.so.0").resolve()
    own = PATHS["LOWKV_GGML_VERSION"].encode()
    assert own in base.read_bytes()
    base.write_bytes(base.read_bytes().replace(own, b"0.99.0"))
    env = {"LD_LIBRARY_PATH": str(libraries), "LOWKV_CACHE_DIR": str(tmp_path / "cache")}

    def run(*options):
        return lowkv("run", *options, "--", TOOLS / "llama-completion", *ASK, **env)
    assert run().said(r"lowkv: ggml 0\.99\.0 is newer than this lowkv knows .*: tried here in [\d.]+ s, and fits")
    again = run()
    assert again.code == 0, again.both
    again.said(r"lowkv: ggml 0\.99\.0 is newer .*: tried before, and fits")
    again.said("lowkv: active: scheme lowkv2.8, 30 layers")
    refused = run("--no-trial")
    assert refused.code == 1 and "this program has ggml 0.99.0" in refused.both, refused.both
