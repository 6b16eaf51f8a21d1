"""Make the usual build of torchvision importable beside a CPU build of torch; installed into .venv by install.sh where there is no other build.

That build's compiled operators want torch's CUDA library. Reading pictures needs none of them, but torchvision describes two of them when it is
imported and fails if nothing has declared them. Python imports this file at its start (by a .pth file), before anybody knows whether torchvision will
be needed, so it only waits for that import.
"""

import sys
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

DECLARED = ("nms", "qnms")


class DeclaresOperators(MetaPathFinder):
    """Declares the operators before torchvision is imported for the first time, and finds nothing itself."""

    def find_spec(self, name, path=None, target=None):
        """Return None, after the operators are declared if `name` is torchvision."""
        if name == "torchvision":
            sys.meta_path.remove(self)
            with suppress(ImportError):  # without torch there is nothing to declare
                declare(PathFinder.find_spec(name, path))
        return None


def declare(spec) -> None:
    """Declare the operators unless torchvision's own can be loaded. spec: of torchvision; None where it is not installed."""
    import torch  # noqa: TID251 - it stands beside torchvision, in neither of our packages

    for folder in spec.submodule_search_locations if spec is not None else ():
        try:
            torch.ops.load_library(f"{folder}/_C.so")
            return
        except OSError:
            pass
    global library  # declarations go with their library
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in DECLARED:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, DeclaresOperators())
