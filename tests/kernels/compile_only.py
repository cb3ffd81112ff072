"""Compile kernels for sm_90 (or another GPU) without one: registers, spills, shared memory, wgmma.

`with compile_only(90) as compiled:` turns every launch inside into a compilation and collects the
results; `python compile_only.py [section ...]` does so with every case of the benchmark.
"""

import contextlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
from nanovllm.kernels import launch  # noqa: E402


@contextlib.contextmanager
def compile_only(capability=90, num_sms=132):
    class FakeDriver:
        def get_current_device(self):
            return 0

        def get_current_stream(self, device=0):
            return 0

        def get_current_target(self):
            return GPUTarget("cuda", capability, 32)

        def get_device_interface(self):
            return torch.cuda

        def get_active_torch_device(self):
            return torch.device("cpu")

        def is_active(self):
            return True

    triton.runtime.driver.set_active(FakeDriver())
    compiled, original = {}, JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        kernel = original(self, *args, grid=grid, warmup=True, **kwargs)
        compiled[kernel.hash] = kernel
        return kernel

    hopper = capability >= 90
    facts = launch.Gpu(num_sms=num_sms, pdl=hopper, large_shared_memory=hopper)
    real_gpu, launch.gpu = launch.gpu, lambda device: facts
    JITFunction.run = run
    try:
        with launch.interpreted():
            yield compiled
    finally:
        JITFunction.run = original
        launch.gpu = real_gpu


def resources(kernel):
    """(registers, stack bytes i.e. spills, shared memory, instruction counts) of a kernel."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [str(tools / "cuobjdump"), "-res-usage", file.name], capture_output=True, text=True
        ).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    ptx = kernel.asm["ptx"]
    names = "wgmma.mma_async", "mma.sync", "cp.async.cg", "ld.local", "griddepcontrol.wait"
    return registers, stack, kernel.metadata.shared, {n: ptx.count(n) for n in names if n in ptx}


def report(compiled, label="", skip=()):
    for kernel in [k for h, k in compiled.items() if h not in skip]:
        registers, stack, shared, counts = resources(kernel)
        warps = kernel.metadata.num_warps
        print(
            f"{label:34s} {kernel.name:26s} regs {registers:3d} stack {stack:4d} "
            f"smem {shared:6d} warps {warps} {counts}",
            flush=True,
        )


def main():
    import bench_kernels as bench

    bench.DEVICE = "cpu"
    bench.rand = lambda *shape, scale=1.0: torch.empty(shape, dtype=bench.DTYPE)  # never touched
    seen = set()
    for section in sys.argv[1:] or bench.SECTIONS:
        sections = bench.SECTIONS | bench.SWEEPS
        for case in sections[section](small=False):
            with compile_only() as compiled:
                case.run(0)
            report(compiled, case.name, seen)
            seen |= set(compiled)


if __name__ == "__main__":
    main()
