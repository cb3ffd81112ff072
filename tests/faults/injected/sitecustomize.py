"""Python imports this first where its folder is on PYTHONPATH: a fault point in every rank.

NANOVLLM_TEST_FAULT=KIND:RANK:STEP makes that rank's forward of that step raise or exit.
"""

import os

if "NANOVLLM_TEST_FAULT" in os.environ:
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.utils import distributed

    kind, rank, step = os.environ["NANOVLLM_TEST_FAULT"].split(":")
    num_steps = 0
    forward = ModelRunner._forward

    def faulty_forward(self, *args, **kwargs):
        global num_steps
        num_steps += 1
        is_here = distributed.tp_size() > 1 and distributed.tp_rank() == int(rank)
        if is_here and num_steps == int(step) and "NANOVLLM_TEST_FAULT" in os.environ:
            if kind == "exit":
                os._exit(3)
            raise ArithmeticError("an injected fault")
        return forward(self, *args, **kwargs)

    ModelRunner._forward = faulty_forward
