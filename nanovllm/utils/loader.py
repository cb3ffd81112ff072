"""Fill a model from safetensors files, strict both ways.

Owns which files of a folder are read, and the comparison of their tensors with the model's
parameters. Knows no model and no sharding: a parameter's `checkpoint_shapes` say which tensors it
is made of, its `weight_loader` takes them, and the model's `packed_modules_mapping` names them.
"""

import hashlib
import json
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# Tensors that old checkpoints carry although they follow from the config.
KNOWN_EXTRAS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
MAX_NAMES = 5


class ModelLoadError(ValueError):
    """The checkpoint's files are damaged or do not belong to the model."""


@dataclass(frozen=True)
class _Stored:
    """A tensor as a file's header describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _Target:
    """The part of a parameter that a checkpoint tensor fills."""

    param: nn.Parameter
    shard_id: str | int | None
    shape: tuple[int, ...]
    # Another name of a parameter that has one already, as a tied head's.
    is_alias: bool


def check_checkpoint(model: nn.Module, path: str | Path) -> None:
    """Compare the headers of the files in `path` with the model, which may be on the meta device.

    Missing, unexpected, duplicate and mis-shaped tensors are ModelLoadErrors. No weight is read.
    """
    _match(_targets(model), _read_headers(Path(path)), Path(path))


@torch.no_grad()
def load_model(
    model: nn.Module, path: str | Path, device: torch.device, show_progress: bool = False
) -> None:
    """Fill every parameter of `model`, which is on `device`, from the files in `path`.

    Tensors go straight to the device, one at a time. Where the config ties two parameters and the
    checkpoint has different tensors for them (a head of its own), the checkpoint is believed.
    """
    stored = _read_headers(Path(path))
    _match(_targets(model), stored, Path(path))
    _untie_where_stored_apart(model, stored, device)
    targets = {name: target for name, target in _targets(model).items() if not target.is_alias}
    filled = set()
    for name, loaded in tqdm(
        _read_tensors(targets, stored, device),
        total=len(targets),
        desc="Loading weights",
        unit="tensor",
        disable=not show_progress,
    ):
        param, shard_id = targets[name].param, targets[name].shard_id
        _check_overflow(name, stored[name], loaded, param.dtype)
        param.weight_loader(param, loaded, shard_id)  # type: ignore[attr-defined]
        filled.add(name)
    assert filled == set(targets), f"parameters not filled: {set(targets) - filled}"


@torch.no_grad()
def load_dummy(model: nn.Module, seed: int = 0) -> None:
    """Fill norms with ones and everything else with normal(0, 0.02), the same for the same seed."""
    for i, (name, param) in enumerate(model.named_parameters()):
        if name.endswith("norm.weight"):
            param.fill_(1.0)
        else:
            param.normal_(0.0, 0.02, generator=torch.Generator(param.device).manual_seed(seed + i))


def _targets(model: nn.Module) -> dict[str, _Target]:
    """Checkpoint tensor name -> what it fills."""
    sources = defaultdict(list)
    mapping: dict[str, tuple[str, Any]] = getattr(model, "packed_modules_mapping", {})
    for source, (packed, shard_id) in mapping.items():
        sources[packed].append((source, shard_id))
    targets = {}
    seen: set[int] = set()
    for name, param in model.named_parameters(remove_duplicate=False):
        # The dot in front lets a module at the top have a prefix too.
        prefix, module, leaf = f".{name}".rsplit(".", 2)
        for source, shard_id in sources.get(module, [(module, None)]):
            shape = param.checkpoint_shapes[shard_id]  # type: ignore[attr-defined]
            stored_name = f"{prefix}.{source}.{leaf}"[1:]
            targets[stored_name] = _Target(param, shard_id, shape, id(param) in seen)
        seen.add(id(param))
    return targets


def _weight_files(path: Path) -> list[Path]:
    """The files that make up the checkpoint: those the index lists, or the single one, or all."""
    if not path.is_dir():
        raise ModelLoadError(f"model: got {str(path)!r}, needs a directory, try the right path")
    if (path / INDEX_NAME).is_file():
        return _indexed_files(path)
    files = sorted(filter(os.path.isfile, path.glob("*.safetensors")))
    if not files:
        others = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".gguf", ".pt"))
        raise ModelLoadError(
            f"model: got {str(path)!r} with {_some(others) or 'no weights'}, needs *.safetensors "
            "files, try the safetensors version of this checkpoint"
        )
    if path / SINGLE_NAME in files and len(files) > 1:
        ignored = [file.name for file in files if file.name != SINGLE_NAME]
        logger.info("%s is read, beside it are ignored: %s", SINGLE_NAME, _some(ignored))
        files = [path / SINGLE_NAME]
    return files


def _indexed_files(path: Path) -> list[Path]:
    """The files an index lists; others in the folder, a consolidated copy say, are not read."""
    index_file = path / INDEX_NAME
    try:
        names = sorted(set(json.loads(index_file.read_text("utf-8"))["weight_map"].values()))
    except Exception as error:  # json also raises RecursionError
        raise ModelLoadError(
            f"{index_file}: got no weight_map of tensor names to files ({error!r}), needs one, "
            "try downloading the file again"
        ) from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or "\\" in name:
            raise ModelLoadError(
                f"{index_file}: got the file {name!r}, needs plain names of files in this folder, "
                "try the original index"
            )
        if not os.path.isfile(path / name):  # no error for a name that is too long
            raise ModelLoadError(
                f"{index_file}: got {name!r} in its list but not in the folder, needs all "
                f"{len(names)} files, try downloading the checkpoint again"
            )
    return [path / name for name in names]


def _read_headers(path: Path) -> dict[str, _Stored]:
    """All tensors of the checkpoint, without their values."""
    stored: dict[str, _Stored] = {}
    for file in _weight_files(path):
        with _open(file, torch.device("cpu")) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                header = tensors.get_slice(name)
                if name in stored:
                    raise ModelLoadError(
                        f"{name}: got it in {stored[name].file.name} and in {file.name}, needs "
                        "one of them, try removing the file that is not part of the checkpoint"
                    )
                stored[name] = _Stored(file, tuple(header.get_shape()), header.get_dtype())
    return stored


def _match(targets: dict[str, _Target], stored: dict[str, _Stored], path: Path) -> None:
    """Raise unless names and shapes agree, apart from tensors known not to matter."""
    extras = [name for name in stored if name.endswith(KNOWN_EXTRAS)]
    if extras:
        logger.info("Skipping tensors that follow from the config: %s", _some(extras))
    unexpected = sorted(stored.keys() - targets.keys() - set(extras))
    missing = sorted(n for n, t in targets.items() if n not in stored and not t.is_alias)
    problems = []
    if missing:
        problems.append(f"without {_some(missing)}")
    if unexpected:
        files = sorted({stored[name].file.name for name in unexpected})
        problems.append(f"with unknown {_some(unexpected)} in {_some(files)}")
    for name in sorted(targets.keys() & stored.keys()):
        tensor, shape = stored[name], targets[name].shape
        if tensor.shape != shape or tensor.dtype not in FLOAT_DTYPES:
            problems.append(
                f"with {name} of {tensor.dtype} {list(tensor.shape)} in {tensor.file.name}, not of "
                f"a float type {list(shape)}"
            )
    if problems:
        more = f" and {len(problems) - MAX_NAMES} more" if len(problems) > MAX_NAMES else ""
        raise ModelLoadError(
            f"model: got {str(path)!r} {'; '.join(problems[:MAX_NAMES])}{more}, needs exactly the "
            "tensors that config.json describes, try downloading the checkpoint again"
        )


def _untie_where_stored_apart(
    model: nn.Module, stored: dict[str, _Stored], device: torch.device
) -> None:
    """Give an alias a parameter of its own if the checkpoint's tensor differs from the tied one."""
    targets = _targets(model)
    for alias in [name for name, target in targets.items() if target.is_alias and name in stored]:
        shared = targets[alias].param
        name = next(name for name, target in targets.items() if target.param is shared)
        first, second = (tensor for _, tensor in _read_tensors([name, alias], stored, device))
        if torch.equal(first, second):
            continue
        logger.warning(
            "%s: the config ties it to %s, but %s has a different tensor for it, which is used",
            alias,
            name,
            stored[alias].file.name,
        )
        own = nn.Parameter(torch.empty_like(shared), requires_grad=False)
        own.__dict__.update(shared.__dict__)
        module, _, leaf = alias.rpartition(".")
        setattr(model.get_submodule(module), leaf, own)


def _read_tensors(
    names: Iterable[str], stored: dict[str, _Stored], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and values of each tensor, each file opened once."""
    by_file = defaultdict(list)
    for name in names:
        by_file[stored[name].file].append(name)
    for file, names_in_file in by_file.items():
        with _open(file, device) as tensors:
            for name in names_in_file:
                yield name, tensors.get_tensor(name)


@contextmanager
def _open(file: Path, device: torch.device) -> Iterator[Any]:
    """An open safetensors file; what goes wrong in reading it is an error that names it."""
    try:
        with safe_open(file, framework="pt", device=str(device)) as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{file}: got a file that cannot be read ({error}), needs a complete safetensors file, "
            "try downloading it again"
        ) from error


def _check_overflow(name: str, source: _Stored, loaded: torch.Tensor, dtype: torch.dtype) -> None:
    """Refuse values that the model's type turns into infinities; only float16 is that narrow."""
    if dtype == torch.float16 and loaded.dtype != dtype and loaded.numel():
        largest = loaded.abs().max().item()
        if largest > torch.finfo(dtype).max:
            raise ModelLoadError(
                f"dtype: got float16 for {name} in {source.file.name} whose largest value is "
                f"{largest:.3g}, needs at most {torch.finfo(dtype).max}, try bfloat16 or float32"
            )


def _some(names: list[str]) -> str:
    """The first few names, and how many there are."""
    more = f", ... ({len(names)} in all)" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def fingerprint(checkpoint: Path) -> str:
    """What ranks compare to see that they read the same files: names and sizes of all of them."""
    files = sorted(f for f in checkpoint.iterdir() if f.suffix in (".json", ".safetensors"))
    listed = "\n".join(f"{f.name} {f.stat().st_size}" for f in files)
    return hashlib.sha256(listed.encode()).hexdigest()[:16]
