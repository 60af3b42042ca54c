"""What `make dist` made, used as on another machine: no compiler, no source tree, no cache of the set-up's.

`make test-dist` makes it first. The wheel goes into an empty environment; the archive into a root that holds nothing
but Debian's C and C++ libraries and a shell (as root only: chroot)."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from plugin_tools import MODEL, PATHS, ROOT, TOOLS

DIST = Path(os.environ.get("LOWKV_DIST", "dist")).resolve()
ASKED = ("-m", MODEL, "-p", "Once upon a time", "-n", "8", "--temp", "0", "-no-cnv")
# Packages of the root: their libraries, a shell and what `ldd` is.
PACKAGES = ("libc6", "libc-bin", "libgcc-s1", "libstdc++6", "dash", "bash", "libtinfo6", "coreutils", "grep", "sed")


@pytest.fixture(scope="session")
def bare(tmp_path_factory):
    """A PATH without compilers, CMake and Python: links to a few tools."""
    folder = tmp_path_factory.mktemp("bin")
    for tool in ("sh", "bash", "ldd", "cat", "ls", "dirname", "env", "test"):
        (folder / tool).symlink_to(shutil.which(tool))
    return str(folder)


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """An empty virtual environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("venv") / "env"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    wheel, = DIST.glob("*.whl")
    subprocess.run([folder / "bin/python", "-m", "pip", "install", "-q", wheel], check=True)
    return folder


@pytest.fixture(scope="session")
def archive(tmp_path_factory):
    """The archive's folder, unpacked."""
    path, = DIST.glob(f"*{platform.machine()}.tar.gz")
    folder = tmp_path_factory.mktemp("archive")
    with tarfile.open(path) as tar:
        tar.extractall(folder, filter="data")
    return next(folder.iterdir())


@pytest.fixture(scope="session", params=["wheel", "archive"])
def command(request):
    folder = request.getfixturevalue("environment" if request.param == "wheel" else "archive")
    return folder / "bin/lowkv"


def run(command, *args, bare, home, **variables):
    return subprocess.run([str(x) for x in (command, *args)], capture_output=True, text=True, errors="replace",
                          stdin=subprocess.DEVNULL, timeout=300, env={"PATH": bare, "HOME": str(home), **variables})


def test_checksums():
    lines = (DIST / "SHA256SUMS").read_text().splitlines()
    assert len(lines) >= 3  # the wheel, its source archive, the tar.gz
    for line in lines:
        digest, name = line.split("  ")
        assert hashlib.sha256((DIST / name).read_bytes()).hexdigest() == digest


def test_what_it_needs():
    wheel, = DIST.glob("*.whl")
    assert "manylinux_2_34" in wheel.name
    path, = DIST.glob(f"*{platform.machine()}.tar.gz")
    with tarfile.open(path) as tar:
        names = tar.getnames()
    assert sum(name.endswith("/lib/lowkv/libggml-lowkv.so") for name in names) == 1


def test_nothing_is_remembered_of_where_it_was_built(archive):
    for file in ("bin/lowkv", "lib/lowkv/libggml-lowkv.so"):
        text = (archive / file).read_bytes()
        assert str(ROOT).encode() not in text and str(Path.home()).encode() not in text, file


def test_doctor(command, bare, tmp_path):
    done = run(command, "doctor", "-m", MODEL, bare=bare, home=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(command.parents[1] / "lib/lowkv/libggml-lowkv.so") + " loads, and computes rightly" in done.stdout


@pytest.mark.parametrize("program", ["llama-completion", "llama-bench"])
def test_run_with_stock_llama_cpp(program, command, bare, tmp_path):
    asked = ASKED if program == "llama-completion" else ("-m", MODEL, "-p", "0", "-n", "4", "-r", "1")
    done = run(command, "run", "--", TOOLS / program, *asked, bare=bare, home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "lowkv: active: scheme lowkv2.8, 30 layers" in done.stderr


def test_generate(command, bare, tmp_path):
    done = run(command, "generate", "-m", MODEL, "-p", "Once upon a time", "-n", "8", bare=bare, home=tmp_path)
    assert done.returncode == 0 and "scheme lowkv2.8" in done.stdout + done.stderr, done.stderr


@pytest.mark.parametrize("name", sorted(x for x in PATHS if re.fullmatch(r"LOWKV_LLAMA_\d+_\d+_\d+", x)))
def test_run_with_older_llama_cpp(name, command, bare, tmp_path):
    """Those of `make test-versions`, where that has been run."""
    done = run(command, "run", "--", Path(PATHS[name]) / "llama-simple", "-m", MODEL, "-n", "4", "Once", bare=bare,
               home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "lowkv: active: scheme lowkv2.8, 30 layers" in done.stderr


def test_the_package_in_the_environment(environment, bare, tmp_path):
    """It quantizes without torch, and finds the plug-in for llama-cpp-python."""
    script = ("import sys, numpy, lowkv, lowkv.llama_cpp as l; from pathlib import Path; "
              "print(lowkv.__version__, l.plugin_path(), 'torch' in sys.modules)")
    done = run(environment / "bin/python", "-c", script, TOOLS, bare=bare, home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] == [str((environment / "lib/lowkv/libggml-lowkv.so").resolve()), "False"]


def test_the_package_computes(environment):
    """What needs no torch: arrays quantized and back."""
    python = environment / "bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "pytest"], check=True)
    tests = [ROOT / "tests/python" / name for name in ("test_quantize.py", "test_turboquant.py")]
    subprocess.run([python, "-m", "pytest", "--noconftest", *tests], check=True)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("apt-get"), reason="chroot into packages of Debian: as root")
def test_a_root_with_nothing_but_libraries(archive, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    tmp_path.chmod(0o777)
    subprocess.run(["apt-get", "download", "-q", *PACKAGES], cwd=tmp_path, check=True, capture_output=True)
    for package in tmp_path.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    for folder in ("bin", "lib", "lib64", "sbin"):  # Debian 12's packages still have /lib and /bin beside /usr
        (root / folder).mkdir(exist_ok=True)
    for folder in ("proc", "tmp", "dev"):
        (root / folder).mkdir(exist_ok=True)
    (root / "dev/null").touch()
    shutil.copytree(archive, root / "lowkv")
    shutil.copy(MODEL, root / "model.gguf")
    tools = root / "llama"
    tools.mkdir()
    for file in TOOLS.glob("lib*.so*"):
        shutil.copy(file, tools, follow_symlinks=False)
    shutil.copy(TOOLS / "llama-completion", tools)
    # Stock llama.cpp with OpenMP needs its library as ever; the command has one of its own.
    shutil.copy(next((archive / "lib/lowkv").glob("libgomp*")), tools)

    def inside(*args):
        chroot = shutil.which("chroot") or "/usr/sbin/chroot"
        return subprocess.run([chroot, root, *args], capture_output=True, text=True, timeout=300, errors="replace",
                              env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LD_LIBRARY_PATH": "/llama"})

    mounted = subprocess.run(["mount", "-t", "proc", "proc", root / "proc"], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("no /proc can be mounted here")
    try:
        doctor = inside("/lowkv/bin/lowkv", "doctor", "-m", "/model.gguf")
        assert doctor.returncode == 0, doctor.stdout + doctor.stderr
        asked = ("-m", "/model.gguf", *ASKED[2:])
        done = inside("/lowkv/bin/lowkv", "run", "--", "/llama/llama-completion", *asked)
        assert done.returncode == 0 and "lowkv: active: scheme lowkv2.8" in done.stderr, done.stderr
    finally:
        subprocess.run(["umount", root / "proc"], check=True)
