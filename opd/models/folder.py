"""Is there a model at all, and is it complete? Checked before anything heavy is imported or
started.

It reads names, sizes and headers: a folder's `config.json`, its tokenizer, and the header of each
safetensors file, which tells how long the file must be. It loads no weights and imports no torch.
For a model on the hub, it requests the list of files, once.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from opd.models.vocabulary import check_vocabulary
from trainer.errors import StartupError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_TIMEOUT_S = 3.0
_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_LENGTH_BYTES = 8
"""A safetensors file: the length of its header, the header (JSON), the tensors' bytes."""
_LONGEST_HEADER = 100_000_000
_LFS = b"version https://git-lfs"
_WRITES_NOTHING = re.compile(
    r"For(MaskedLM|\w*Classification|QuestionAnswering|MultipleChoice|PreTraining)$"
)
"""Classes in `architectures` whose names end like this do not write text."""
_AGAIN = "copy or download it again"
_LOCAL = "give a local folder that has config.json, *.safetensors and tokenizer.json"
_CONVERT = (
    "is in the format GGUF, which cannot be trained: give the folder of the original model "
    "(*.safetensors), or convert it once with ./run.sh models FILE.gguf NEW_FOLDER, and give that"
)


def check_model(model: str) -> None:
    """Raise StartupError, one line, unless `model` is a folder with a complete model, or the id of
    a model that the hub (or its local cache) has.
    """
    path = Path(model)
    if path.is_dir():
        check_folder(path)
    elif path.is_file():
        what = _CONVERT if path.suffix == ".gguf" else "is a file: give the folder of the model"
        raise StartupError(f"model: {model} {what}")
    elif not _HUB_ID.fullmatch(model) or path.suffix == ".gguf":
        raise StartupError(f"model: no folder {model}{_near(path)}: {_LOCAL}")
    else:
        _check_hub(model)


def check_folder(folder: Path) -> None:
    """Raise StartupError for a model folder that lacks something or has a damaged file."""
    _check_config(folder)
    _check_weights(folder)
    _check_tokenizer(folder)
    check_vocabulary(folder)


def _near(path: Path) -> str:
    """The folder next to it that was probably meant."""
    if not path.parent.is_dir():
        return f" ({path.parent} does not exist either)"
    names = [one.name for one in path.parent.iterdir() if one.is_dir()]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" (did you mean {path.parent / near[0]}?)" if near else ""


def _check_config(folder: Path) -> None:
    file = folder / _CONFIG
    if not file.is_file():
        if any(folder.glob("*.gguf")):
            raise StartupError(f"model: the model in {folder} {_CONVERT}")
        if any(folder.glob("step_*")):
            raise StartupError(f"model: {folder} contains checkpoints: give one of its folders")
        if (folder / "adapter_config.json").is_file():
            raise StartupError(
                f"model: {folder} contains an adapter: make it a model with ./run.sh policy export"
            )
        below = sorted(one.parent for one in folder.glob(f"*/{_CONFIG}"))
        meant = f"; did you mean {below[0]}?" if below else f": {_LOCAL}"
        raise StartupError(f"model: {folder} has no {_CONFIG}{meant}")
    config = _read_json(file)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise StartupError(f"model: {file} does not state its model_type: is it a language model?")
    if not _is_known_type(model_type):
        raise StartupError(
            f"model: {file}: architecture {model_type!r} is unknown to the installed transformers: "
            "use another model, or update transformers"
        )
    _check_not_quantised(file, config)
    kinds = config.get("architectures")
    if isinstance(kinds, list) and kinds and all(_WRITES_NOTHING.search(str(k)) for k in kinds):
        raise StartupError(
            f"model: {file}: {', '.join(map(str, kinds))} does not write text: give the folder of "
            "a causal language model"
        )


def _check_not_quantised(file: Path, config: dict[str, Any]) -> None:
    quantised = config.get("quantization_config")
    if isinstance(quantised, dict):
        method = quantised.get("quant_method", "an unnamed method")
        raise StartupError(
            f"model: {file}: the weights are quantised ({method}), which cannot be trained: give "
            "the folder of the original model, in bfloat16 or float32"
        )


def _is_known_type(model_type: str) -> bool:
    """Whether transformers has this architecture, by its files: importing it takes seconds."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None, "it is a dependency"
    for root in spec.submodule_search_locations or ():
        models = Path(root) / "models"
        if (models / model_type.replace("-", "_") / "__init__.py").is_file():
            return True
        for name in ("auto_mappings.py", "configuration_auto.py"):
            file = models / "auto" / name
            if file.is_file() and f'"{model_type}"' in file.read_text(encoding="utf-8"):
                return True
    return False


def _check_weights(folder: Path) -> None:
    index = folder / _INDEX
    if index.is_file():
        shards = _read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise StartupError(f"model: {index} names no weight files: {_AGAIN}")
        names = sorted(set(map(str, shards.values())))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise StartupError(
                f"model: {folder} lacks {len(missing)} of the {len(names)} weight files that "
                f"{_INDEX} names, {missing[0]} first: {_AGAIN}"
            )
        files: Iterable[Path] = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
        older = sorted(folder.glob("pytorch_model*.bin"))
        if not files and not older:
            raise StartupError(f"model: {folder} has no weights (*.safetensors): {_AGAIN}")
        for file in older if not files else ():
            if not file.stat().st_size:
                raise StartupError(f"model: {file} is empty: {_AGAIN}")
    for file in files:
        _check_safetensors(file)


def _check_safetensors(file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as opened:
        begin = opened.read(len(_LFS))
        if begin == _LFS:
            raise StartupError(f"model: {file} is a Git LFS pointer: fetch it with git lfs pull")
        if size < _LENGTH_BYTES:
            what = "is empty" if not size else f"is cut off after {size} bytes"
            raise StartupError(f"model: {file} {what}: {_AGAIN}")
        (length,) = struct.unpack("<Q", begin[:_LENGTH_BYTES])
        if length > min(size - _LENGTH_BYTES, _LONGEST_HEADER):
            what = "is not a safetensors file" if length > _LONGEST_HEADER else "is cut off"
            raise StartupError(f"model: {file} {what}: {_AGAIN}")
        opened.seek(_LENGTH_BYTES)
        header = opened.read(length)
    try:
        ends = [
            int(tensor["data_offsets"][1])
            for name, tensor in orjson.loads(header).items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise StartupError(f"model: {file} is not a safetensors file: {_AGAIN}") from None
    wanted = _LENGTH_BYTES + length + max(ends, default=0)
    if size != wanted:
        what = "is cut off" if size < wanted else "is longer than its header says"
        raise StartupError(f"model: {file} {what}: {size} of {wanted} bytes: {_AGAIN}")


def _check_tokenizer(folder: Path) -> None:
    found = [name for name in _TOKENIZERS if (folder / name).is_file()]
    if not found and not any(folder.glob("*.tiktoken")):
        raise StartupError(
            f"model: {folder} has no tokenizer (tokenizer.json): copy it from the model that this "
            "one was made from"
        )
    for name in found:
        file = folder / name
        if file.suffix == ".json":
            _read_json(file)
        elif not file.stat().st_size:
            raise StartupError(f"model: {file} is empty: {_AGAIN}")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise StartupError(f"model: {file} is not valid JSON ({error}): {_AGAIN}") from None
    if not isinstance(value, dict):
        raise StartupError(f"model: {file} is not a JSON object: {_AGAIN}")
    return value


def _check_hub(model: str) -> None:
    """One request without retries: whoever is offline learns that at once."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    cached = try_to_load_from_cache(model, _CONFIG)
    if isinstance(cached, str):
        check_folder(Path(cached).parent)
        return
    here = f"model: no folder {model} here"
    try:
        found = HfApi().model_info(model, timeout=_HUB_TIMEOUT_S)
    except OfflineModeIsEnabled:
        raise StartupError(
            f"{here}, it is not in the hub's cache, and HF_HUB_OFFLINE is set: {_LOCAL}"
        ) from None
    except GatedRepoError:
        raise StartupError(
            f"model: {model} is gated on {constants.ENDPOINT}: accept its terms there and log in "
            "(hf auth login), or give a local folder"
        ) from None
    except RepositoryNotFoundError:
        raise StartupError(
            f"{here}, and {constants.ENDPOINT} has no model of this name (or requires a login): "
            f"{_LOCAL}"
        ) from None
    except HfHubHTTPError as error:
        said = str(error).strip().splitlines()[0]
        raise StartupError(f"{here}, and {constants.ENDPOINT} says {said}: {_LOCAL}") from None
    except Exception as error:
        # Whatever its HTTP client raises if there is no network.
        if not _is_of_the_network(error):
            raise
        raise StartupError(
            f"{here}, and the hub {constants.ENDPOINT} cannot be reached: {_LOCAL}"
        ) from None
    names = {one.rfilename for one in found.siblings or ()}
    if any(name.endswith(".gguf") for name in names) and _CONFIG not in names:
        raise StartupError(f"model: the model in {model} {_CONVERT}")
    if _CONFIG not in names:
        raise StartupError(f"model: {model} on the hub has no {_CONFIG}: is it a language model?")
    if not any(name.endswith((".safetensors", ".bin")) for name in names):
        raise StartupError(f"model: {model} on the hub has no weights (*.safetensors)")
    if names.isdisjoint(_TOKENIZERS):
        raise StartupError(f"model: {model} on the hub has no tokenizer (tokenizer.json)")


def _is_of_the_network(error: Exception) -> bool:
    # By name, because the hub's client chooses its own HTTP client.
    names = {kind.__name__ for kind in type(error).__mro__}
    return "TransportError" in names or isinstance(error, OSError)
