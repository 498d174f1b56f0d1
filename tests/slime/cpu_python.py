"""`python cpu_python.py SITES GPU (-m MODULE | FILE) ARGUMENTS`: slime's Python without a GPU.

SITES is where SGLang is if not in this environment: folders, of which the first is searched before
everything else and the others after. torchvision's wheel is built for CUDA and asks for operators
that a CPU build of torch lacks; declaring them is enough to import it. With GPU = 1, torch says
that there is a GPU of a kind that slime runs on: Megatron asks no more while it checks arguments.
"""

from __future__ import annotations

import os
import runpy
import sys
import types

sites, claimed, *command = sys.argv[1:]
sys.path.pop(0)  # this folder
first, *others = sites.split(os.pathsep)
if first:
    sys.path.insert(0, first)
sys.path.extend(others)

import torch  # noqa: E402

library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
if claimed == "1":
    hopper = types.SimpleNamespace(
        major=9, minor=0, name="stand-in", total_memory=80 << 30, multi_processor_count=132
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: hopper  # type: ignore[assignment,return-value]
if command[0] == "-m":
    sys.argv = command[1:]
    runpy.run_module(command[1], run_name="__main__", alter_sys=True)
else:
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
