"""A packed cache for llama-cpp-python: `enable()` loads lowkv's plug-in into the ggml that llama_cpp has loaded.

    import lowkv.llama_cpp
    lowkv.llama_cpp.enable("lowkv2.8")
    model = llama_cpp.Llama("model.gguf", n_gpu_layers=-1, flash_attn=True)

Both options are needed, although all weights stay on the CPU: without them llama.cpp keeps a cache of its own.
`active()` tells, after the first tokens.

Where another program makes the `Llama`, `attach()` does all of that: for llama_cpp's server by `python -m
lowkv.llama_cpp SERVER-ARGUMENTS`, for any program that imports llama_cpp by the variable LOWKV_LLAMA_CPP=lowkv2.8."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from lowkv._core import Error, default_scheme

__all__ = ["active", "attach", "enable", "plugin_path", "stats"]

_LIBRARY = "libggml-lowkv.so"
_GPU_TYPES = (1, 2)  # GGML_BACKEND_DEVICE_TYPE_GPU and _IGPU of ggml-backend.h

_plugin: ctypes.CDLL | None = None  # what enable() loaded


def enable(scheme: str = default_scheme, *, plugin: str | os.PathLike | None = None,
           calibration: str | os.PathLike | Sequence[str | os.PathLike] | None = None) -> Path:
    """Lets the caches that llama_cpp makes from here on hold `scheme` (`lowkv schemes` lists them), and says so in
    one line on stderr. Returns the plug-in's path. Doing it again changes the scheme of later caches.

    plugin: libggml-lowkv.so; without it LOWKV_PLUGIN, then a library beside this package, then the one that came with
    the command `lowkv`. calibration: files of `lowkv calibrate`, for schemes that need
    one; without it LOWKV_CALIBRATION. Sets LOWKV_SCHEME and LOWKV_CALIBRATION in this process. Raises lowkv.Error
    where anything is in the way."""
    global _plugin
    if not isinstance(scheme, str) or not scheme:
        raise Error(f"scheme must be a str such as {default_scheme!r}, not {scheme!r}")
    calibrations = None if calibration is None else _calibrations(calibration)
    llama_cpp = _llama_cpp()
    host = llama_cpp.llama_cpp._lib
    _require_no_gpu(host)
    path = plugin_path(plugin)
    loaded = _open(path, host)
    os.environ["LOWKV_SCHEME"] = scheme
    if calibrations is not None:
        os.environ["LOWKV_CALIBRATION"] = calibrations
    host.ggml_backend_load.restype = ctypes.c_void_p
    if not host.ggml_backend_load(os.fsencode(path)):
        raise Error(f"llama_cpp's ggml did not take {path}; its own message is above")
    problem = loaded.lowkv_setting_error().decode()
    if problem:
        raise Error(problem.replace("name it in LOWKV_", "name it in calibration= or LOWKV_"))
    _plugin = loaded
    print(f"lowkv: llama-cpp-python {llama_cpp.__version__} (ggml {_version(host)}) makes its caches as {scheme} from "
          f"here on, with {path}", file=sys.stderr)
    return path


def attach(scheme: str = "") -> None:
    """enable(), for each `Llama` that is made from here on: it gets the two options, and one token when it is made,
    which shows whether its cache is packed; if not, lowkv.Error is raised in place of the `Llama`. Those that make
    embeddings are left as they are, as they keep no conversation. scheme: "" stands for LOWKV_SCHEME or the default."""
    enable(scheme or os.environ.get("LOWKV_SCHEME") or default_scheme)
    made = _llama_cpp().Llama
    stock = getattr(made.__init__, "stock", made.__init__)  # attached twice, it is still wrapped once

    @functools.wraps(stock)  # servers look at its arguments' names
    def make(self, *args, **arguments):
        if arguments.get("embedding") or arguments.get("vocab_only"):
            return stock(self, *args, **arguments)
        stock(self, *args, **{**arguments, "n_gpu_layers": -1, "flash_attn": True})
        self.eval([max(self.token_bos(), 0)])
        if not active():
            raise Error("the cache of this Llama is not packed; the plug-in's message is above. To go on with a cache "
                        "of f16, leave out LOWKV_LLAMA_CPP and lowkv.llama_cpp")
        self.reset()
    make.stock = stock
    made.__init__ = make


def stats() -> dict[str, int | str]:
    """What the live caches hold, as the plug-in tells: the `scheme` of the one that was made last, and of all of them
    together their number (`caches`), `packed_layers`, `plain_layers` (kept as f16, here or in other memory),
    `packed_bytes`, `exact_bytes`, `reopened_blocks` and `restarted_statistics`. Not to be called while llama_cpp
    computes."""
    if _plugin is None:
        raise Error("lowkv.llama_cpp.enable() has not been called, or has failed")
    text = ctypes.create_string_buffer(_plugin.lowkv_stats_json(None, 0) + 1)
    _plugin.lowkv_stats_json(text, len(text))
    return json.loads(text.value)


def active() -> bool:
    """Whether all layers of the live caches are packed. A cache is made packed or plain with its first tokens: raises
    lowkv.Error for one that has none yet."""
    now = stats()
    if now["caches"] and not now["packed_layers"] and not now["exact_bytes"]:
        raise Error("the cache has no tokens yet, and only they show whether it is packed: evaluate some, then ask")
    return now["packed_layers"] > 0 and now.get("plain_layers", 0) == 0  # a plug-in may be older


def plugin_path(plugin: str | os.PathLike | None = None) -> Path:
    """The plug-in for llama.cpp: what `plugin` names, or LOWKV_PLUGIN; else the one beside this package, or beside the
    command `lowkv`. Other programs take it by GGML_BACKEND_PATH. Raises lowkv.Error."""
    for name, named in (("plugin", plugin), ("LOWKV_PLUGIN", os.environ.get("LOWKV_PLUGIN"))):
        if named:
            return _existing(Path(named), f"{name}={os.fspath(named)}")
    command = shutil.which("lowkv", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    folders = [Path(__file__).parent]
    if command:
        programs = Path(command).resolve().parent
        folders += [programs, *(programs.parent / name for name in ("lib", "lib/lowkv", "lib64"))]
    for folder in folders:
        if (folder / _LIBRARY).is_file():
            return folder / _LIBRARY
    raise Error(f"there is no {_LIBRARY}: install lowkv's wheel of a release, or build lowkv in a clone of it "
                "(make) and put its build/release/bin on the PATH, or name the library in plugin= or LOWKV_PLUGIN")


def _existing(path: Path, source: str) -> Path:
    if not path.is_file():
        raise Error(f"{source}: there is no file {path.absolute()}; expected the plug-in, {_LIBRARY}")
    return path.resolve()


def _calibrations(given) -> str:
    """As LOWKV_CALIBRATION has them."""
    paths = [given] if isinstance(given, (str, os.PathLike)) else list(given)
    found = []
    for path in map(Path, paths):
        if not path.is_file():
            raise Error(f"calibration: there is no file {path}; expected one that `lowkv calibrate` wrote")
        if ":" in str(path.absolute()):
            raise Error(f"calibration: {path.absolute()} has a colon, which separates paths in LOWKV_CALIBRATION; "
                        "rename it")
        found.append(str(path.absolute()))
    return ":".join(found)


def _llama_cpp():
    """The package, whose libraries are loaded with it."""
    if sys.platform != "linux":
        raise Error(f"the plug-in for llama.cpp runs on Linux, not on {sys.platform}")
    try:
        import llama_cpp
    except ModuleNotFoundError as error:
        if error.name != "llama_cpp":
            raise
        raise Error("lowkv.llama_cpp needs llama-cpp-python: pip install llama-cpp-python") from error
    # Through libllama's own handle: ggml's registry must be the one that it uses, and a wheel has several copies of
    # each library, which a path could load a second time.
    host = getattr(llama_cpp.llama_cpp, "_lib", None)
    if host is None or not hasattr(host, "ggml_backend_load") or not hasattr(host, "ggml_version"):
        raise Error(f"llama_cpp {llama_cpp.__version__} shows no ggml that takes plug-ins: it must be built with "
                    "shared libraries, as pip does, and be as new as docs/llama.cpp/versions.md says")
    return llama_cpp


def _require_no_gpu(host: ctypes.CDLL) -> None:
    """llama.cpp gives the cache to the first GPU, and llama_cpp.Llama can't name another device."""
    host.ggml_backend_dev_get.restype = ctypes.c_void_p
    host.ggml_backend_dev_count.restype = ctypes.c_size_t
    host.ggml_backend_dev_name.restype = ctypes.c_char_p
    for index in range(host.ggml_backend_dev_count()):
        device = ctypes.c_void_p(host.ggml_backend_dev_get(ctypes.c_size_t(index)))
        name = host.ggml_backend_dev_name(device).decode()
        if host.ggml_backend_dev_type(device) in _GPU_TYPES and name != "LOWKV":
            raise Error(f"this llama_cpp has the device {name}, which takes the cache; lowkv runs on the CPU: install "
                        "llama-cpp-python built without GPU support, or hide the GPU (CUDA_VISIBLE_DEVICES=)")


def _open(path: Path, host: ctypes.CDLL) -> ctypes.CDLL:
    """The plug-in, once it is known to be made for the ggml of `host`."""
    ours = _version(host)
    try:
        plugin = ctypes.CDLL(str(path))
    except OSError as error:
        raise Error(f"{path} can't be loaded beside llama_cpp's ggml {ours}: {error}") from None
    try:
        plugin.lowkv_misfit.restype = ctypes.c_char_p
        plugin.lowkv_setting_error.restype = ctypes.c_char_p
        plugin.lowkv_stats_json.restype = ctypes.c_size_t
        plugin.lowkv_stats_json.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
    except AttributeError:
        raise Error(f"{path} is not lowkv's plug-in for llama.cpp, or is older than this package") from None
    if problem := plugin.lowkv_misfit().decode():
        _try(path, host, problem)
    if _address(plugin.ggml_backend_load) != _address(host.ggml_backend_load):
        raise Error(f"{path} would use another copy of ggml than llama_cpp does: another package has loaded one "
                    "before; import llama_cpp first")
    return plugin


def _try(path: Path, host: ctypes.CDLL, problem: str) -> None:
    """Lets the plug-in join a ggml that is newer than all it knows, if a trial in another process shows that it fits
    (plugins/llama.cpp/trial/trial.cpp)."""
    folders = (path.parent, path.parent.parent / "bin", Path(sysconfig.get_path("scripts")))
    program = next((file for folder in folders if (file := folder / "lowkv-trial").is_file()), None)
    libraries = Path(host._name).resolve().parent
    if program is None:
        raise Error(f"{path}: {problem}")
    environment = {name: value for name, value in os.environ.items() if name != "GGML_BACKEND_PATH"}
    done = subprocess.run([program, path], env={**environment, "LD_LIBRARY_PATH": str(libraries)},
                          capture_output=True, text=True, check=False)
    if done.returncode:
        found = done.stdout.strip() or f"the trial ended with status {done.returncode}"
        raise Error(f"{path}: {problem}. Tried here, it does not fit: {found}")
    if not done.stdout.strip():  # it is older than all that is served
        raise Error(f"{path}: {problem}")
    version, os.environ["LOWKV_TRIED"] = done.stdout.split()
    print(f"lowkv: ggml {version} is newer than this lowkv knows: tried here, and fits", file=sys.stderr)


def _version(host: ctypes.CDLL) -> str:
    host.ggml_version.restype = ctypes.c_char_p
    return host.ggml_version().decode()


def _address(function) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


if __name__ == "__main__":
    from lowkv import llama_cpp as lowkv_llama_cpp  # not this copy of it, whose name is __main__

    try:
        lowkv_llama_cpp.attach()
    except Error as problem:
        sys.exit(f"lowkv: {problem}")
    runpy.run_module("llama_cpp.server", run_name="__main__", alter_sys=True)
