"""What a dependency is, and the kinds that several of them are."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tools import SetupError, run, say, sha256

HERE = Path(__file__).resolve().parent
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


class Part:
    """One dependency. `inputs` is everything that shapes the result; `make` fills the folder."""

    name = about = ""
    needs = ()
    stamp = ".complete"  # its presence says that the part is
    home = property(lambda self: self.name)  # begins the folder's name; parts of one build share it

    def inputs(self, setup):
        return {}

    def make(self, setup, folder):
        raise NotImplementedError

    def paths(self, setup, folder):
        return {}


def make_environment(folder, log, label):
    shutil.rmtree(folder)
    run([sys.executable, "-m", "venv", folder], log, f"{label}: making the environment "
        "(on Debian this needs python3-venv)")


class Venv(Part):
    """A virtual environment with pinned packages: those of deps/requirements-*.txt."""

    def __init__(self, name, about, variable, fallback_index=None, options=()):
        self.name, self.about, self.variable = name, about, variable
        self.fallback_index, self.options = fallback_index, options
        self.requirements = HERE / f"requirements-{name.removeprefix('venv-')}.txt"

    def inputs(self, setup):
        return {"requirements": sha256(self.requirements), "python": PYTHON, "base": sys.base_prefix}

    def make(self, setup, folder):
        log = setup.cache / f"{self.name}.log"
        make_environment(folder, log, self.name)
        pip = [folder / "bin" / "python", "-m", "pip", "install", *self.options]
        attempts = [(["-r", self.requirements], "installing")]
        if self.fallback_index:
            attempts.append((["-r", self.requirements, "--extra-index-url", self.fallback_index],
                             f"trying again with {self.fallback_index}"))
            # Where only PyPI can be reached: its own build, CUDA packages and all.
            plain = folder / "requirements.txt"
            plain.write_text(self.requirements.read_text().replace("+cpu", ""))
            attempts.append((["-r", plain], "trying again with PyPI's own torch, several gigabytes"))
        for number, (arguments, what) in enumerate(attempts, 1):
            try:
                return run(pip + arguments, log, f"{self.name}: {what}")
            except SetupError:
                if number == len(attempts):
                    raise
                say(f"{self.name}: {attempts[number][1]}")

    def paths(self, setup, folder):
        return {self.variable: folder / "bin" / "python"}


class Pip(Part):
    name = "venv-pip"
    about = "a Python environment with nothing but pip, which fetches from PyPI"

    def inputs(self, setup):
        return {"python": PYTHON, "base": sys.base_prefix}

    def make(self, setup, folder):
        make_environment(folder, setup.cache / f"{self.name}.log", self.name)


class Cmake(Venv):
    """Links in the cache's bin folder, which the Makefile has on its PATH, lead to it."""

    OLDEST = (3, 22)

    def __init__(self):
        super().__init__("venv-cmake", "CMake, for systems without one or with one older than 3.22", None)

    def make(self, setup, folder):
        super().make(setup, folder)
        links = setup.cache / "bin"
        links.mkdir(exist_ok=True)
        for name in ("cmake", "ctest"):
            (links / name).unlink(missing_ok=True)
            (links / name).symlink_to(folder / "bin" / name)

    def paths(self, setup, folder):
        return {}


def cmake(setup):
    """The system's CMake where it will do, or else PyPI's."""
    found = shutil.which("cmake")
    if found:
        said = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
        version = re.search(r"version (\d+)\.(\d+)", said)
        if version and tuple(map(int, version.groups())) >= Cmake.OLDEST:
            return found
    return setup.need("venv-cmake") / "bin" / "cmake"


class Beside(Part):
    """Packages that lie beside those of venv-transformers and go before them on PYTHONPATH."""

    needs = ("venv-transformers",)

    def __init__(self, name, about, variable, requirements, options=(), inside="packages"):
        self.name, self.about, self.variable, self.options, self.inside = name, about, variable, options, inside
        self.requirements = HERE / requirements

    def inputs(self, setup):
        return {"requirements": sha256(self.requirements), "python": PYTHON}

    def make(self, setup, folder):
        python = setup.need("venv-transformers") / "bin" / "python"
        packages = folder / self.inside
        packages.mkdir(exist_ok=True)
        run([python, "-m", "pip", "install", "--upgrade", *self.options, "--target", packages, "-r",
             self.requirements], setup.cache / f"{self.name}.log", f"{self.name}: installing")

    def paths(self, setup, folder):
        return {self.variable: folder / self.inside}


def pip_download(setup, requirement, options=()):
    """A fetch function for `download` that takes one file from the Python package index."""
    python = setup.need("venv-pip") / "bin" / "python"

    def fetch(folder):
        run([python, "-m", "pip", "download", "--no-deps", *options, "-d", folder, requirement],
            setup.cache / "pip.log", f"downloading {requirement}")

    return fetch
