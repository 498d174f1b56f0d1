"""Start the installed SGLang on a machine without a GPU. Runs in .venv-sglang, not in .venv.

    .venv-sglang/bin/python launch.py --model-path MODEL --device cpu ...

Every argument is SGLang's own. Two things that SGLang imports exist only for CUDA and are declared
here first: torchvision's compiled operators, for which Python code registers fakes, and the package
`sgl_kernel`, every name of which becomes a function that raises when it is called. A path that
needs a kernel therefore fails by name and computes nothing. Pinned memory, which needs an
accelerator, is left out.

With `--exit-with-parent` the server stops when its standard input closes, that is, when the process
that started it is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

EXIT_WITH_PARENT = "--exit-with-parent"


class KernelPackage(ModuleType):
    """A package without kernels: names resolve, calls raise NotImplementedError."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> object:
        # Python's own lookups (__file__, __wrapped__, ...) must find nothing.
        if name.startswith("__"):
            raise AttributeError(name)
        kernel = f"{self.__name__}.{name}"

        def absent(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"{kernel} is a CUDA kernel: it cannot run on this CPU")

        absent.__name__ = absent.__qualname__ = name
        return absent


def declare_torchvision_operators() -> object:
    """Declare the operators whose fakes `import torchvision` registers; keep what is returned."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def leave_memory_unpinned() -> None:
    """Nothing can be pinned without an accelerator, but SGLang's adapters ask for it anyway."""
    import torch

    def unpinned(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return call

    for name in ("empty", "tensor", "arange", "zeros", "ones", "full"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]


def stop_with_parent() -> None:
    """Send this process SIGTERM once standard input ends."""

    def wait() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stop-with-parent", daemon=True).start()


# At import and not under __main__: SGLang starts its scheduler by importing this file again.
_operators = declare_torchvision_operators()
sys.modules["sgl_kernel"] = KernelPackage("sgl_kernel")
leave_memory_unpinned()


def main(arguments: list[str]) -> None:
    """Run SGLang's HTTP server with these arguments until it is told to stop."""
    from sglang.launch_server import run_server  # pyright: ignore[reportMissingImports]
    from sglang.srt.server_args import prepare_server_args  # pyright: ignore[reportMissingImports]
    from sglang.srt.utils import kill_process_tree  # pyright: ignore[reportMissingImports]

    if EXIT_WITH_PARENT in arguments:
        arguments = [item for item in arguments if item != EXIT_WITH_PARENT]
        stop_with_parent()
    try:
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
