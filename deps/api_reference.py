#!/usr/bin/env python3
"""The API reference of the Python package, as HTML. Fails, and says where, if a public name has no docstring.

`make docs` runs it where lowkv, torch, transformers, lmcache and pdoc can be imported."""

import argparse
import importlib
import inspect
import sys
from pathlib import Path

import pdoc

MODULES = ("lowkv", "lowkv.llama_cpp", "lowkv.lmcache")


def public(module):
    """Name and object of what a module offers: its __all__, or what it defines."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [name for name, value in vars(module).items()
                 if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__]
    return [(name, getattr(module, name)) for name in names]


def members(kind):
    """Name and object of the methods and properties that one of our classes defines itself or takes from another."""
    for owner in kind.__mro__:
        for name, value in vars(owner).items():
            documented = callable(value) or isinstance(value, (property, classmethod, staticmethod))
            if owner.__module__.startswith("lowkv") and documented and not name.startswith("_"):
                yield name, getattr(value, "__func__", value)


def undocumented(module):
    """Public names without a docstring of their own; a constant needs its name in the module's."""
    if not module.__doc__:
        yield module.__name__
    for name, value in public(module):
        if isinstance(value, (str, int, float, tuple, dict)):
            if name not in (module.__doc__ or ""):
                yield f"{module.__name__}.{name} (a constant, to be named in the module's docstring)"
        elif not value.__doc__:
            yield f"{module.__name__}.{name}"
        if inspect.isclass(value):
            yield from (f"{module.__name__}.{name}.{member}" for member, of in members(value) if not of.__doc__)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the folder for the pages")
    args = parser.parse_args()
    missing = []
    for name in MODULES:
        module = importlib.import_module(name)
        missing += undocumented(module)
        for public_name, value in public(module):  # pdoc does not ask for what is imported lazily
            setattr(module, public_name, value)
    for name in missing:
        print(f"no docstring: {name}")
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*MODULES, output_directory=args.out)
    print(f"API reference: {args.out}/lowkv.html, {len(missing)} names without a docstring")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
