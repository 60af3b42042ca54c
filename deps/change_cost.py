#!/usr/bin/env python3
"""What a change costs: applies each change of deps/changes/ in a scratch copy of this tree, builds it, has programs
write what follows from it, runs its tests, and counts the files that were edited by hand. Fails where a change does
not apply, build or pass, or needs more files than its bar. `make change-cost`, minutes a change.

A change is a TOML file: `what`, the `bar`, `build` (targets), `write` (commands that write files), `test` (commands),
and its edits: `[[edit]]` puts `text` behind (`after`), before (`before`) or in place of (`replace`) a text that occurs
once in `file`; `[[new]]` makes a `file` of `text`, or of the text of another (`copy`) with words exchanged (`words`).
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
CHANGES = ROOT / "deps/changes"


class Failed(Exception):
    """A change does not apply, build, write or pass."""


def run(command, tree, log, **environment):
    with open(log, "a") as out:
        print(f"$ {command}", file=out, flush=True)
        done = subprocess.run(["bash", "-ec", command], cwd=tree, stdout=out, stderr=subprocess.STDOUT, check=False,
                              env={**os.environ, **environment})
    if done.returncode:
        raise Failed(f"`{command}` failed (exit status {done.returncode}):\n" + "\n".join(
            Path(log).read_text(errors="replace").splitlines()[-15:]))


def git(*words, tree=ROOT):
    done = subprocess.run(["git", *words], cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout


def apply(change, tree):
    """The files that it edits or makes."""
    for edit in change.get("edit", ()):
        file = tree / edit["file"]
        text, (place,) = file.read_text(), [word for word in ("after", "before", "replace") if word in edit]
        anchor = edit[place]
        if text.count(anchor) != 1:
            raise Failed(f"{edit['file']} has this {text.count(anchor)} times, not once: {anchor!r}")
        new = {"after": anchor + edit["text"], "before": edit["text"] + anchor, "replace": edit["text"]}[place]
        file.write_text(text.replace(anchor, new))
    for new in change.get("new", ()):
        text = (tree / new["copy"]).read_text() if "copy" in new else new["text"]
        for old, word in new.get("words", {}).items():
            text = text.replace(old, word)
        (tree / new["file"]).parent.mkdir(parents=True, exist_ok=True)
        (tree / new["file"]).write_text(text)
    return sorted({part["file"] for part in (*change.get("edit", ()), *change.get("new", ()))})


def changed(tree):
    git("add", "-A", tree=tree)
    return set(git("diff", "--cached", "--name-only", tree=tree).splitlines())


def try_change(path, tree, options):
    """Files by hand, and those that programs wrote."""
    change = tomllib.loads(path.read_text())
    log = options.logs / f"{path.stem}.log"
    log.unlink(missing_ok=True)
    edited = apply(change, tree)
    ninja = f"{options.build} --target {shlex.join(change['build'])}"
    if not options.apply:
        run(ninja, tree, log)
        for command in change.get("write", ()):
            run(command, tree, log)
        if change.get("write"):  # some of it is compiled in
            run(ninja, tree, log)
        for command in change["test"]:
            run(command, tree, log, LOWKV_BUILD_DIR=str(tree / "build/release"))
    return change, edited, sorted(changed(tree) - set(edited))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="changes (default: all of deps/changes)")
    parser.add_argument("--apply", action="store_true", help="build and test nothing: whether they apply, and to what")
    parser.add_argument("--logs", type=Path, default=ROOT / "build/change-cost", help="default: %(default)s")
    options = parser.parse_args()
    options.build = "cmake --build build/release"
    options.logs.mkdir(parents=True, exist_ok=True)
    paths = [CHANGES / f"{name}.toml" for name in options.names] or sorted(CHANGES.glob("*.toml"))
    bad = False
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a lane's time is up: the scratch copy goes all the same
    # Beside the logs, so that a ccache that knows this tree knows the copy.
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=options.logs) as folder:
        tree = Path(folder) / "tree"
        commit = git("stash", "create").strip() or "HEAD"  # uncommitted edits are part of the tree
        git("worktree", "add", "--detach", str(tree), commit)
        try:
            if not options.apply:
                run("cmake --preset release", tree, options.logs / "configure.log")
            for path in paths:
                start = time.monotonic()
                git("reset", "--hard", commit, tree=tree)
                git("clean", "-fdq", "-e", "build", tree=tree)
                try:
                    change, edited, written = try_change(path, tree, options)
                except Failed as error:
                    print(f"FAILED {path.stem}: {error}", flush=True)
                    bad = True
                    continue
                over = len(edited) > change["bar"]
                bad |= over
                print(f"{'FAILED' if over else 'ok':6} {change['what']}: {len(edited)} files (at most {change['bar']})"
                      f"{f', {len(written)} written' if written else ''}, {time.monotonic() - start:.0f} s")
                print(*(f"         {file}" for file in edited), *(f"         {file} (written)" for file in written),
                      sep="\n", flush=True)
        finally:
            git("worktree", "remove", "--force", str(tree))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
