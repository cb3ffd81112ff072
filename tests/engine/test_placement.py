"""R24: the type to compute in, wherever and however the checkpoint names its own."""

from types import SimpleNamespace

import pytest
import torch

from nanovllm.config import Config
from nanovllm.engine.placement import select_dtype

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_name", [True, False])
def test_auto_is_the_checkpoints_own_type_on_cuda(field, dtype, is_name):
    value = str(dtype).removeprefix("torch.") if is_name else dtype
    hf_config = SimpleNamespace(**{field: value})
    assert select_dtype(Config("m"), hf_config, CUDA) == dtype
    assert select_dtype(Config("m"), hf_config, CPU) == torch.float32


@pytest.mark.parametrize("fields", [{}, {"dtype": None}, {"torch_dtype": "auto"}])
def test_auto_without_a_type_in_the_config_is_bfloat16_on_cuda(fields):
    assert select_dtype(Config("m"), SimpleNamespace(**fields), CUDA) == torch.bfloat16


@pytest.mark.parametrize("device", [CUDA, CPU])
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_an_explicit_type_goes_before_the_checkpoints(name, device):
    for fields in ({}, {"dtype": "float32"}, {"torch_dtype": torch.float16}):
        found = select_dtype(Config("m", dtype=name), SimpleNamespace(**fields), device)
        assert found == getattr(torch, name)
