"""A program with an engine of several ranks, to which a test does bad things.

    program.py RANKS PHASE KIND VICTIM [STEP_TIMEOUT]

It starts an engine, lets VICTIM end as KIND says in PHASE, and prints a line of JSON: what it
caught, after how many seconds, and what is left. Then, if the fault was another rank's, it starts a
second engine and uses it. KIND: a signal's name, "exit" or "raise".
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

from nanovllm import LLM, SamplingParams
from nanovllm.errors import EngineDeadError

CHECKPOINT = Path(__file__).parents[1] / "assets" / "tiny-qwen3"
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [[1, 2, 3], list(range(5, 60))]


def workers() -> dict[int, int]:
    """Rank -> process id, in the order in which they were started."""
    ours = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # dead, and not waited for yet
            if "nanovllm.engine.worker" in child.cmdline():
                ours.append(child)
    return {rank: c.pid for rank, c in enumerate(sorted(ours, key=lambda c: c.pid), 1)}


def harm(kind: str, victim: int) -> float:
    """Do it, and say when."""
    pid = workers()[victim] if victim else os.getpid()
    now = time.monotonic()
    os.kill(pid, getattr(signal, kind))
    return now


def make(num_ranks: int, step_timeout: float) -> LLM:
    return LLM(
        str(CHECKPOINT),
        device=os.environ.get("NANOVLLM_FAULTS_DEVICE", "cpu"),
        num_kvcache_blocks=16,
        tensor_parallel_size=num_ranks,
        step_timeout=step_timeout,
    )


def left_over() -> dict[str, int]:
    me = psutil.Process()
    return {
        "processes": len([c for c in me.children(recursive=True) if c.status() != "zombie"]),
        "zombies": len([c for c in me.children(recursive=True) if c.status() == "zombie"]),
        "sockets": len([c for c in me.net_connections() if c.status == "LISTEN"]),
        "unix_sockets": len(me.net_connections("unix")),
    }


def run(num_ranks: int, phase: str, kind: str, victim: int, step_timeout: float) -> dict:
    times = []
    if phase == "start":

        def when_started() -> None:
            while len(workers()) < num_ranks - 1:
                time.sleep(0.01)
            times.append(harm(kind, victim))

        threading.Thread(target=when_started, daemon=True).start()
    try:
        with make(num_ranks, step_timeout) as llm:
            launch, counts = llm._runner.launch, {"prefill": 0, "decode": 0}

            def harmful_launch(batch):
                name = "prefill" if batch.is_prefill else "decode"
                counts[name] += 1
                if phase == name and counts[name] == (1 if name == "prefill" else 4):
                    times.append(harm(kind, victim))
                return launch(batch)

            llm._runner.launch = harmful_launch
            if phase == "idle":
                times.append(harm(kind, victim))
                time.sleep(0.1)
            print(json.dumps({"workers": workers()}), flush=True)
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            if phase == "shutdown":
                times.append(harm(kind, victim))
        caught = None
    except EngineDeadError as error:
        caught = error
    return {
        "seconds": time.monotonic() - times[0] if times else None,
        "error": type(caught).__name__ if caught else None,
        "message": str(caught) if caught else None,
        **left_over(),
    }


def main() -> None:
    num_ranks, phase, kind, victim = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    step_timeout = float(sys.argv[5]) if len(sys.argv) > 5 else 60.0
    print(json.dumps(run(num_ranks, phase, kind, victim, step_timeout)), flush=True)
    os.environ.pop("NANOVLLM_TEST_FAULT", None)
    with make(2, 60.0) as llm:
        tokens = [o["token_ids"] for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    print(json.dumps({"tokens": tokens, **left_over()}), flush=True)


if __name__ == "__main__":
    main()
