"""Stands in for SGLang's CUDA kernels, whose real package cannot be loaded without a CUDA driver.

SGLang imports names from ``sgl_kernel`` at start-up but calls none of them on the CPU with the torch_native
backend. Every name and every submodule exists here; calling one is an error that says which. On PYTHONPATH
of CPU servers only.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Missing:
    """A kernel, or a constant such as ``scalar_types.uint4b8``: may be named, hashed and compared, not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> "_Missing":
        if attribute.startswith("__"):  # whoever asks for a protocol must see that there is none
            raise AttributeError(attribute)
        return _Missing(f"{self._name}.{attribute}")

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(f"{self._name} is a CUDA kernel, and this SGLang server runs on a CPU")


def _missing_from(module: str):
    def lookup(name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{module}.{name}")

    return lookup


class _Submodules(MetaPathFinder, Loader):
    """Makes ``import sgl_kernel.anything`` succeed."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = _missing_from(spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names appear as they are asked for."""


__getattr__ = _missing_from(__name__)
sys.meta_path.insert(0, _Submodules())
