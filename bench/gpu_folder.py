#!/usr/bin/env python3
"""Puts what a machine with an NVIDIA GPU needs to test and measure lowkv into one folder (make gpu-folder): tests, the
Python packages, the benchmarks and gpu_run.sh, as one archive that a machine without a network unpacks and runs."""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BACKEND = "nanobind-backend==1.0.0"  # python/cuda/pyproject.toml has the same


def copy_llama(to: Path) -> None:
    """Stock llama.cpp's tools, the plug-in that was built with CUDA, and a model of random weights with heads of 128
    channels."""
    found = json.loads(subprocess.check_output([sys.executable, ROOT / "deps/setup.py", "--paths"]))
    tools = Path(found["LOWKV_LLAMA_BUILD"])
    (to / "llama").mkdir()
    names = ["llama-completion", "llama-bench"]
    names += [path.name for end in ("*.so.0", "*-impl.so") for path in tools.glob(end)]
    for program in names:
        shutil.copy(tools / program, to / "llama")
    shutil.copy(ROOT / "build/cuda/lib/libggml-lowkv.so", to / "llama")
    for file in (to / "llama").iterdir():
        subprocess.run(["strip", file], check=True)
    model = f"pathlib.Path({str(to / 'model.gguf')!r})"
    write = f"import plugin_models, pathlib; plugin_models.llama({model}, layers=8, heads=8, head_dim=128)"
    subprocess.run([found["LOWKV_PYTHON"], "-c", write], cwd=ROOT / "tests/e2e", check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="the version of the other machine's Python (default: 3.12)")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    with tempfile.TemporaryDirectory() as made:
        to = Path(made)
        for program in ("test_gpu_codes", "test_gpu_attention", "test_gpu_caller", "cuda_attention"):
            shutil.copy(ROOT / "build/cuda/bin" / program, to)
            subprocess.run(["strip", to / program], check=True)
        for package in ("build/python/site/lowkv", "build/python-gpu/site/lowkv_cuda"):
            shutil.copytree(
                ROOT / package, to / "site" / Path(package).name, ignore=shutil.ignore_patterns("__pycache__")
            )
        copy_llama(to)
        # nanobind's part is of one Python: the other machine's.
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary=:all:",
                "--implementation",
                "cp",
                "--python-version",
                arguments.python,
                "--platform",
                "manylinux_2_28_x86_64",
                "--dest",
                to / "wheel",
                BACKEND,
            ],
            check=True,
        )
        for wheel in (to / "wheel").iterdir():
            zipfile.ZipFile(wheel).extractall(to / "site")
        shutil.rmtree(to / "wheel")
        for script in ("gpu_attention.py", "gpu_decode.py", "gpu_run.sh"):
            shutil.copy(ROOT / "bench" / script, to)
        for test in ("test_gpu.py", "families.py"):
            shutil.copy(ROOT / "tests/python" / test, to)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        archive = shutil.make_archive(str(folder / "lowkv-gpu"), "gztar", to)
    size = Path(archive).stat().st_size / 2**20
    print(f"{archive} ({size:.0f} MiB): there, tar xzf lowkv-gpu.tar.gz && bash gpu_run.sh")


if __name__ == "__main__":
    main()
