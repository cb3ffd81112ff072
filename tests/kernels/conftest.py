"""Kernel tests run interpreted on the CPU (small cases) or, marked gpu, compiled on the GPU.

Interpreting needs TRITON_INTERPRET=1 before any kernel module is imported: set it at the top of the
root conftest when there is no GPU. The interpreter multiplies the raw bits of bf16 in tl.dot, so
interpreted cases use fp32 and fp16.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from nanovllm.kernels import launch  # noqa: E402
from nanovllm.kernels.rms_norm import _rms_norm_kernel  # noqa: E402


@pytest.fixture(autouse=True)
def kernels_for_cpu_tensors(request):
    """CPU tensors go through the interpreted kernels; gpu tests are skipped without a GPU."""
    torch.manual_seed(0)
    if request.node.get_closest_marker("gpu"):
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
        yield
    elif type(_rms_norm_kernel).__name__ != "InterpretedFunction":
        pytest.skip("needs Triton, and TRITON_INTERPRET=1 before the kernels are imported")
    else:
        with launch.interpreted():
            yield
