"""Gives every program that imports llama_cpp a packed cache, where LOWKV_LLAMA_CPP names a scheme: a `.pth` file of the
package imports this when Python starts, and nothing where the variable is not set."""

import importlib.util
import os
import sys


class _Finder:
    """Finds llama_cpp as others do, once, and attaches lowkv to it when it has been imported."""

    def find_spec(self, name, path, target=None):
        if name != "llama_cpp":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        if found is not None and found.loader is not None:
            stock = found.loader.exec_module

            def import_it(module):
                stock(module)
                from lowkv.llama_cpp import attach

                scheme = os.environ["LOWKV_LLAMA_CPP"]
                attach("" if scheme == "1" else scheme)
            found.loader.exec_module = import_it
        return found


sys.meta_path.insert(0, _Finder())
