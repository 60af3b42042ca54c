#!/usr/bin/env python3
"""Fetch and build the pinned dependencies of lowkv into a cache outside the source tree.

Every part is checked by sha256 (or pinned by version, for Python packages), lands in a folder whose
name carries a hash of everything that shaped it, and counts as present only once its stamp file is
written. So an interrupted run is repaired by the next one, and a complete one is a no-op.
"""

import argparse
import fcntl
import json
import os
import sys
import time
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent))

import parts  # noqa: E402  (needs the path above)
from tools import SetupError, fingerprint, say  # noqa: E402

CACHE = Path(os.environ.get("LOWKV_CACHE_DIR") or Path.home() / ".cache" / "lowkv").resolve()


class Setup:
    """The cache folder, and the parts already present in it."""

    def __init__(self, cache):
        self.cache = cache
        self.downloads = cache / "downloads"
        self.downloads.mkdir(parents=True, exist_ok=True)

    def folder(self, part):
        return self.cache / f"{part.home}-{fingerprint(part.inputs(self))}"

    def present(self, part):
        return (self.folder(part) / part.stamp).exists()

    def need(self, name):
        """Returns the folder of a part, making it (and what it needs) first if it is not there."""
        part = parts.PARTS[name]
        folder = self.folder(part)
        if not self.present(part):
            for other in part.needs:
                self.need(other)
            start = time.monotonic()
            say(f"{name}: {part.about}")
            folder.mkdir(parents=True, exist_ok=True)
            part.make(self, folder)
            (folder / part.stamp).write_text(json.dumps(part.inputs(self), indent=1) + "\n")
            say(f"{name}: done in {time.monotonic() - start:.0f} s")
        return folder

    def paths(self):
        """Names and values that CMake and the tests read; parts that are not present are left out."""
        found = {"LOWKV_CACHE_DIR": str(self.cache)}
        for part in parts.PARTS.values():
            if self.present(part):
                found.update({k: str(v) for k, v in part.paths(self, self.folder(part)).items()})
        return found

    def write_paths(self):
        found = self.paths()
        cmake = "".join(f'set({key} "{value}")\n' for key, value in found.items())
        for name, text in (("deps.json", json.dumps(found, indent=1) + "\n"), ("deps.cmake", cmake)):
            target = self.cache / name
            if target.exists() and target.read_text() == text:
                continue  # an unchanged time stamp keeps CMake from configuring again
            draft = target.with_suffix(".new")
            draft.write_text(text)
            draft.replace(target)
        return found


def locked(cache):
    """Two runs on one cache must not build the same folder: the second waits for the first."""
    cache.mkdir(parents=True, exist_ok=True)
    lock = open(cache / ".lock", "w")
    # Inherited by the commands that we start: when this program is killed, the lock stays until they
    # have ended too, so that the next run does not build beside a forgotten `make`.
    os.set_inheritable(lock.fileno(), True)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"another set-up is running in {cache}; waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def main():
    names = "\n".join(f"  {p.name:19} {p.about}" for p in parts.PARTS.values())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"parts:\n{names}\n\nWithout a name: {' '.join(parts.DEFAULT)}.\n"
        "The cache is $LOWKV_CACHE_DIR, or else ~/.cache/lowkv.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", nargs="*", help="what to set up (see below)")
    parser.add_argument("--paths", action="store_true", help="print the paths as JSON, set up nothing")
    args = parser.parse_args()
    unknown = [name for name in args.part if name not in parts.PARTS]
    if unknown:
        parser.error(f"no part named {', '.join(unknown)}; there are: {', '.join(parts.PARTS)}")

    setup = Setup(CACHE)
    if args.paths:
        print(json.dumps(setup.paths(), indent=1))
        return 0
    lock = locked(CACHE)
    try:
        for name in args.part or parts.DEFAULT:
            setup.need(name)
    except SetupError as error:
        say(f"failed: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next run goes on from here")
        return 130
    finally:
        setup.write_paths()
        lock.close()
    say(f"ready ({CACHE})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
