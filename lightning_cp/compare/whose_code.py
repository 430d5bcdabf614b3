# SPDX-License-Identifier: Apache-2.0
"""Whose code is it: of the user, of a library that we know, or of another installed package?

Libraries keep what they set up once, and caches; what users keep is what a step changes.
"""

import sys
import types
import weakref
from argparse import Namespace
from collections import ChainMap, UserDict, UserList
from functools import lru_cache, partial
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from queue import Queue
from threading import local
from typing import Any, Final

from torch.optim.lr_scheduler import LRScheduler

# Their functions and objects keep what they set up once, and caches. So do those of other packages
# that are installed from an index; a user's own project may be installed, too.
LIBRARIES: Final = frozenset(
    ("accelerate", "builtins", "hf_patches", "lightning", "lightning_cp", "peft", "torch")
) | {"pytorch_lightning", "torchmetrics", "transformers", "trl"}
"""Packages that we know."""
_INSTALLED: Final = ("site-packages", "dist-packages")
_DATA_PACKAGES: Final = frozenset(("addict", "box", "easydict", "ml_collections", "omegaconf"))

_HOLDERS: Final = (
    *(types.SimpleNamespace, Namespace, UserDict, UserList, ChainMap, local),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, Queue),
)
"""Classes of libraries whose objects hold what users put into them."""

_LEFT_ALONE: Final = frozenset(("lightning_cp", "hf_patches", "torch", "torchmetrics", "builtins"))
"""Of objects of other libraries numbers, texts and lists of them are restored, and no more."""


def is_holder(kind: type) -> bool:
    """Return whether objects of a class hold what users put there."""
    return issubclass(kind, _HOLDERS) or not all(map(is_of_package, kind.__mro__))


def is_metric(kind: type) -> bool:
    """Return whether objects of a class are metrics, whose attributes are their states."""
    return any(base.__module__.partition(".")[0] == "torchmetrics" for base in kind.__mro__)


def is_restored_in_part(kind: type) -> bool:
    """Return whether users change objects of a class of a library: configurations, for example."""
    root = kind.__module__.partition(".")[0]
    if root in ("lightning", "pytorch_lightning"):
        return kind.__name__ == "Trainer"
    if issubclass(kind, LRScheduler):
        return True
    return root not in _LEFT_ALONE and root not in sys.stdlib_module_names


def is_of_user(x: Any) -> bool:
    """Return whether a function or a class is of no library that we know."""
    while isinstance(x, partial):
        x = x.func
    module = getattr(x, "__module__", None) or type(x).__module__
    return module.partition(".")[0] not in LIBRARIES


def is_of_package(x: Any) -> bool:
    """Return whether a function or a class is of Python or of an installed package."""
    return is_package(getattr(x, "__module__", None) or "builtins")


def is_package(module: str) -> bool:
    """Return whether a module is of Python or of an installed package."""
    return _is_installed(module.partition(".")[0])


@lru_cache(maxsize=4096)
def _is_installed(root: str) -> bool:
    if root in LIBRARIES or root in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    is_beside = any(part in _INSTALLED for part in Path(file).parts)
    return is_beside and root not in _DATA_PACKAGES and not _is_project(root)


def _is_project(root: str) -> bool:
    """Return whether an installed package is a folder of the user: ``pip install .`` (PEP 610)."""
    for name in packages_distributions().get(root, ()):
        package = distribution(name)
        installer = (package.read_text("INSTALLER") or "").strip()
        source = package.read_text("direct_url.json") or ""
        if installer == "conda" or "dir_info" not in source:
            return False
    return True
