"""Fill a model from safetensors files, strict both ways.

Owns the comparison of a checkpoint's tensors with the model's parameters. Knows no model and no
sharding: a parameter's `checkpoint_shapes` say which tensors it is made of, its `weight_loader`
takes them, and the model's `packed_modules_mapping` names them. Files are `weight_files`' matter.
"""

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from nanovllm.utils.weight_files import (
    AGAIN,
    DTYPES,
    MAX_NAMES,
    ModelLoadError,
    StoredTensor,
    read_headers,
    read_tensors,
    some,
    wrong,
)

__all__ = ["ModelLoadError", "check_checkpoint", "fingerprint", "load_dummy", "load_model"]
logger = logging.getLogger(__name__)

# Tensors that old checkpoints carry although they follow from the config.
KNOWN_EXTRAS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
# Last parts of tensors' names -> who makes such.
QUANTIZERS = {
    **dict.fromkeys(("qweight", "qzeros", "g_idx"), "AWQ or GPTQ"),
    **dict.fromkeys(("weight_scale_inv", "weight_scale", "input_scale"), "fp8"),
    **dict.fromkeys(("weight_packed", "weight_shape"), "compressed-tensors"),
    **dict.fromkeys(("absmax", "quant_map", "SCB"), "bitsandbytes"),
}
# Parts of names of tensors that belong to something beside the language model.
OTHER_MODULES = {
    **dict.fromkeys(("visual", "vision_tower", "vision_model", "multi_modal_projector"), "vision"),
    **dict.fromkeys(("audio_tower", "audio"), "audio"),
    **dict.fromkeys(("mtp", "mtp_block", "nextn"), "multi-token prediction"),
}
SHOW_AFTER = 1.0  # seconds of loading before the progress bar appears


@dataclass(frozen=True)
class _Target:
    """The part of a parameter that a checkpoint tensor fills."""

    param: nn.Parameter
    shard_id: str | int | None
    shape: tuple[int, ...]
    # Another name of a parameter that has one already, as a tied head's.
    is_alias: bool


def check_checkpoint(model: nn.Module, path: str | Path) -> dict[str, StoredTensor]:
    """Compare the headers of the files in `path` with the model, which may be on the meta device.

    Missing, unexpected, duplicate and mis-shaped tensors are ModelLoadErrors. No weight is read.
    Returns what there is.
    """
    stored = read_headers(Path(path))
    _match(_targets(model, stored), stored, Path(path))
    return stored


@torch.no_grad()
def load_model(
    model: nn.Module, path: str | Path, device: torch.device, show_progress: bool = False
) -> None:
    """Fill every parameter of `model`, which is on `device`, from the files in `path`.

    Tensors go straight to the device. Where the config ties two parameters and the checkpoint has
    different tensors for them (a head of its own), the checkpoint is believed.
    """
    stored = check_checkpoint(model, path)
    _untie_where_stored_apart(model, stored, device)
    targets = {n: target for n, target in _targets(model, stored).items() if not target.is_alias}
    filled = set()
    with tqdm(
        total=sum(stored[name].num_bytes for name in targets),
        desc="Loading weights",
        unit="B",
        unit_scale=True,
        delay=SHOW_AFTER,
        disable=not show_progress,
    ) as progress:
        for name, loaded in read_tensors({name: stored[name] for name in targets}, device):
            param, shard_id = targets[name].param, targets[name].shard_id
            _check_overflow(name, stored[name], loaded, param.dtype)
            param.weight_loader(param, loaded, shard_id)  # type: ignore[attr-defined]
            filled.add(name)
            progress.update(stored[name].num_bytes)
    assert filled == set(targets), f"parameters not filled: {set(targets) - filled}"
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # what steps need is measured from here on


@torch.no_grad()
def load_dummy(model: nn.Module, seed: int = 0) -> None:
    """Fill norms with ones and everything else with normal(0, 0.02), the same for the same seed."""
    for i, (name, param) in enumerate(model.named_parameters()):
        if name.endswith("norm.weight"):
            param.fill_(1.0)
        else:
            param.normal_(0.0, 0.02, generator=torch.Generator(param.device).manual_seed(seed + i))


def _targets(model: nn.Module, stored: Iterable[str]) -> dict[str, _Target]:
    """Checkpoint tensor name -> what it fills, of tied ones under a name that the files have."""
    sources = defaultdict(list)
    mapping: dict[str, tuple[str, Any]] = getattr(model, "packed_modules_mapping", {})
    for source, (packed, shard_id) in mapping.items():
        sources[packed].append((source, shard_id))
    targets: dict[str, _Target] = {}
    owners: dict[int, str] = {}  # the name by which a tied parameter is filled
    for name, param in model.named_parameters(remove_duplicate=False):
        # The dot in front lets a module at the top have a prefix too.
        prefix, module, leaf = f".{name}".rsplit(".", 2)
        for source, shard_id in sources.get(module, [(module, None)]):
            shape = param.checkpoint_shapes[shard_id]  # type: ignore[attr-defined]
            stored_name = f"{prefix}.{source}.{leaf}"[1:]
            owner = owners.setdefault(id(param), name)
            targets[stored_name] = _Target(param, shard_id, shape, owner != name)
            if owner != name and stored_name in stored and owner not in stored:
                targets[owner] = replace(targets[owner], is_alias=True)
                targets[stored_name] = replace(targets[stored_name], is_alias=False)
    return targets


def _match(targets: dict[str, _Target], stored: dict[str, StoredTensor], path: Path) -> None:
    """Raise unless names and shapes agree, apart from tensors known not to matter."""
    extras = [name for name in stored if name.endswith(KNOWN_EXTRAS)]
    if extras:
        logger.info("Skipping tensors that follow from the config: %s", some(extras))
    unexpected = sorted(stored.keys() - targets.keys() - set(extras))
    _check_unquantized(unexpected, path)
    missing = sorted(n for n, t in targets.items() if n not in stored and not t.is_alias)
    problems = []
    if missing:
        problems.append(f"without {some(missing)}")
    if unexpected:
        files = sorted({stored[name].file.name for name in unexpected})
        problems.append(f"with unknown {some(unexpected)} in {some(files)}")
    for name in sorted(targets.keys() & stored.keys()):
        tensor, shape = stored[name], targets[name].shape
        if tensor.shape != shape or tensor.dtype not in DTYPES:
            problems.append(
                f"with {name} of {tensor.dtype} {list(tensor.shape)} in {tensor.file.name}, not of "
                f"a float type {list(shape)}"
            )
    if problems:
        more = f" and {len(problems) - MAX_NAMES} more" if len(problems) > MAX_NAMES else ""
        got = f"{str(path)!r} {'; '.join(problems[:MAX_NAMES])}{more}"
        need = "exactly the tensors that config.json describes"
        raise wrong("model", got, need, _remedy(targets, stored, unexpected))


def _check_unquantized(unexpected: list[str], path: Path) -> None:
    """Refuse by name what a config without quantization_config did not give away."""
    makers = {name: QUANTIZERS.get(name.rpartition(".")[2]) for name in unexpected}
    names = [name for name, maker in makers.items() if maker]
    if names:
        got = f"{str(path)!r} quantized by {makers[names[0]]}, with {some(names)}"
        remedy = "the float16 or bfloat16 checkpoint of this model"
        raise wrong("model", got, "unquantized weights", remedy)


def _remedy(
    targets: dict[str, _Target], stored: dict[str, StoredTensor], unexpected: list[str]
) -> str:
    if any(stored[name].dtype not in DTYPES for name in targets.keys() & stored.keys()):
        return "the float16 or bfloat16 checkpoint of this model, not a quantized one"
    parts = {OTHER_MODULES[p] for name in unexpected for p in name.split(".") if p in OTHER_MODULES}
    if parts:
        return f"a checkpoint of the language model alone, without {' and '.join(sorted(parts))}"
    return AGAIN


def _untie_where_stored_apart(
    model: nn.Module, stored: dict[str, StoredTensor], device: torch.device
) -> None:
    """Give an alias a parameter of its own if the checkpoint's tensor differs from the tied one."""
    targets = _targets(model, stored)
    for alias in [name for name, target in targets.items() if target.is_alias and name in stored]:
        shared = targets[alias].param
        name = next(name for name, target in targets.items() if target.param is shared)
        both = dict(read_tensors({name: stored[name], alias: stored[alias]}, device))
        if torch.equal(both[name], both[alias]):
            continue
        logger.warning(
            f"{alias}: the config ties it to {name}, but {stored[alias].file.name} has a different "
            "tensor for it, which is used"
        )
        own = nn.Parameter(torch.empty_like(shared), requires_grad=False)
        own.__dict__.update(shared.__dict__)
        module, _, leaf = alias.rpartition(".")
        setattr(model.get_submodule(module), leaf, own)


def _check_overflow(
    name: str, source: StoredTensor, loaded: torch.Tensor, dtype: torch.dtype
) -> None:
    """Refuse values that the model's type turns into infinities; only float16 is that narrow."""
    if dtype == torch.float16 and loaded.dtype != dtype and loaded.numel():
        largest, limit = loaded.abs().max().item(), torch.finfo(dtype).max
        if largest > limit:
            got = f"float16 for {name} in {source.file.name} whose largest value is {largest:.3g}"
            raise wrong("dtype", got, f"at most {limit}", "bfloat16 or float32")


def fingerprint(checkpoint: Path) -> str:
    """What ranks compare to see that they read the same files: names and sizes of all of them."""
    files = sorted(f for f in checkpoint.iterdir() if f.suffix in (".json", ".safetensors"))
    listed = "\n".join(f"{f.name} {f.stat().st_size}" for f in files)
    return hashlib.sha256(listed.encode()).hexdigest()[:16]
