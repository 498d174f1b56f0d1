"""Does the device that a setting names exist? Found out without importing torch if possible."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import re
from pathlib import Path

from trainer.errors import StartupError

_CUDA = re.compile(r"cuda(?::(\d+))?")


def check_device(key: str, device: str) -> None:
    """Raise StartupError, one line, if this machine has no `device`; `key` is the setting's."""
    if device == "cpu":
        return
    found = _CUDA.fullmatch(device)
    if found is None:
        _ask_torch(key, device)
        return
    built_for = torch_is_built_for()
    if not built_for:
        version = importlib.metadata.version("torch")
        raise StartupError(
            f"{key}: {device!r} is not there: torch {version} is built without CUDA; install a "
            f"build with it, or set {key} = cpu"
        )
    if "cuda" not in built_for:
        _ask_torch(key, device)
        return
    number = num_cuda_devices()
    if number <= int(found[1] or 0):
        what = f"{number} GPUs" if number else "no NVIDIA GPU, or no driver for one"
        raise StartupError(f"{key}: {device!r} is not there: this machine has {what}; set another")


def torch_is_built_for() -> frozenset[str]:
    """Which of cuda and hip (AMD's) the installed torch can use: read from its file of versions."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None, "it is a dependency"
    text = "".join(
        (Path(root) / "version.py").read_text(encoding="utf-8")
        for root in spec.submodule_search_locations or ()
    )
    return frozenset(re.findall(r"^(cuda|hip)\b[^=\n]*=\s*['\"]", text, flags=re.MULTILINE))


def num_cuda_devices() -> int:
    """GPUs that NVIDIA's driver shows this process; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def _ask_torch(key: str, device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise StartupError(
            f"{key}: {device!r} is not a device of this machine: use cpu, cuda or cuda:N"
        ) from None
