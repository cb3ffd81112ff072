"""Python imports this first where its folder is on PYTHONPATH: two ranks take turns on one GPU.

What runs on two GPUs runs here too, through the same kernels and the same shared memory, only
slowly: kernels that wait for the other rank wait for the GPU to switch to its process.
"""

import os

if "BOTH_RANKS_ON_ONE_GPU" in os.environ:
    import torch

    torch.cuda.device_count = lambda: 2
    torch.cuda._queued_calls.clear()  # torch's start looks at every GPU that is counted
    from nanovllm.engine import model_runner, placement

    def select_device(config, rank):
        device = placement.select_device(config, rank)
        return torch.device("cuda", 0) if device.type == "cuda" else device

    model_runner.select_device = select_device
