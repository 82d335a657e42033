"""Reads a Hugging Face model directory: `config.json`, safetensors weights (one file or shards), stop ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from silva.types import ConfigError

if TYPE_CHECKING:
    import torch
    from safetensors import safe_open


def read_json_object(path: Path) -> dict[str, object]:
    """The JSON object in `path`. Raises ConfigError that names the file and, for broken JSON, the line."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: give a directory that `save_pretrained` wrote") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} line {error.lineno}: not valid JSON: {error.msg}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def hf_config_dict(hf_dir: str | Path) -> dict[str, object]:
    """The parsed `config.json` of a model directory."""
    folder = Path(hf_dir)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a directory: give a local Hugging Face model directory")
    return read_json_object(folder / "config.json")


def weight_files(hf_dir: str | Path) -> list[Path]:
    """The safetensors files of a model directory: `model.safetensors`, or the shards that its index names."""
    folder = Path(hf_dir)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index}: `weight_map` is {weight_map!r}; it must map parameter names to files")
        files = [folder / str(name) for name in sorted(set(weight_map.values()))]
        missing = [path.name for path in files if not path.exists()]
        if missing:
            raise ConfigError(f"{folder} lacks the weight files {missing} that {index.name} names")
        return files
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    other = sorted(path.name for pattern in ("*.bin", "*.gguf", "*.pt") for path in folder.glob(pattern))
    hint = f"; found {other}: load them with transformers and call save_pretrained" if other else ""
    raise ConfigError(f"{folder} holds no model.safetensors and no model.safetensors.index.json{hint}")


def open_weight_files(hf_dir: str | Path, *, framework: str = "numpy") -> Iterator[tuple[Path, safe_open]]:
    """Each file of weights, open. Raises ConfigError where one is missing or cut off."""
    from safetensors import SafetensorError, safe_open

    for path in weight_files(hf_dir):
        try:
            with safe_open(path, framework=framework) as file:
                yield path, file
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error


def load_weights(hf_dir: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of a model directory on the CPU, by Hugging Face parameter name."""
    weights: dict[str, torch.Tensor] = {}
    for path, file in open_weight_files(hf_dir, framework="pt"):
        shard = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
        twice = sorted(weights.keys() & shard.keys())
        if twice:
            raise ConfigError(f"{path} repeats parameters of an earlier shard: {twice[:5]}")
        weights.update(shard)
    return weights
