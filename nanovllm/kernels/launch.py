"""What a kernel launch has to know: is Triton here, does a tensor go to it, what the GPU offers.

Knows no operation. Kernel files import `triton` and `tl` from here, so that the package imports
without Triton (every operation then runs its reference).

Programmatic dependent launch (PDL, sm_90 and later): a kernel launched with it may start before
its predecessor has ended. Each of our kernels lets its successor start (`gdc_launch_dependents`)
and later waits for its predecessor (`gdc_wait`). Ahead of the wait it reads only what is settled
before the step's first such kernel starts: weights, positions, slots, block tables, context
lengths, KV of earlier steps. Whatever writes those must be over by then: any kernel in between
that never releases its successor early (torch's, cuBLAS's) sees to that, and so does a graph's end.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import torch

try:
    import triton
    import triton.language as tl

    missing_triton = None
except ImportError as error:  # kernels stay plain functions that nobody calls
    triton = SimpleNamespace(jit=lambda function=None, **_: function or (lambda kernel: kernel))
    tl = SimpleNamespace(constexpr=float)
    missing_triton = str(error)

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    gdc_launch_dependents = gdc_wait = None

_interpreted = False


@dataclass(frozen=True)
class Gpu:
    """The facts that kernel configurations depend on."""

    num_sms: int = 132
    pdl: bool = False  # sm_90 and later
    large_shared_memory: bool = True  # 227 KB a program (Hopper, data-centre Blackwell), not 99-163


@functools.cache
def gpu(device: torch.device) -> Gpu:
    """Facts of a CUDA device; a CPU (interpreted kernels) counts as a Hopper without PDL."""
    if device.type != "cuda":
        return Gpu()
    properties = torch.cuda.get_device_properties(device)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 0)
    return Gpu(
        num_sms=properties.multi_processor_count,
        pdl=properties.major >= 9 and gdc_wait is not None,
        large_shared_memory=shared_memory >= 200 * 1024,
    )


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether an operation on this tensor runs its kernel (else its torch reference)."""
    return (tensor.is_cuda or _interpreted) and missing_triton is None


@contextmanager
def interpreted() -> Iterator[None]:
    """Send CPU tensors through the kernels too (tests; TRITON_INTERPRET=1 before the import)."""
    global _interpreted
    _interpreted = True
    try:
        yield
    finally:
        _interpreted = False


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
