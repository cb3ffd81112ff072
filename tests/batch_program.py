"""run-batch with an engine that computes nothing, for tests that kill or measure it.

python -m tests.batch_program SECONDS_PER_RESULT run-batch -i ...

Its last line on standard error is JSON: resident MB and microseconds of CPU time for each result,
those of the engine left out, of every 10,000 results. A prompt that says "fail" does.
"""

import json
import random
import sys
import time
from itertools import islice, pairwise

from nanovllm import __main__, run_batch
from nanovllm.engine.request import refused
from nanovllm.sampling_params import SamplingParams

WINDOW = 64
EVERY = 10_000  # results


class StubEngine:
    """Answers depend on the prompt and the params alone, and come in any order."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.resident, self.seconds_at, self.num = [], [], 0

    def generate_each(self, requests):
        window = []
        while True:
            window += islice(requests, WINDOW - len(window))
            if not window:
                return
            place = random.randrange(len(window))
            window[place], window[-1] = window[-1], window[place]
            key, prompt, params = window.pop()
            self.num += 1
            if self.num % EVERY == 0:
                self.resident.append(resident_mb())
                self.seconds_at.append(time.process_time())
            time.sleep(self.seconds) if self.seconds else None
            yield key, answer(key, prompt, params)

    def close(self):
        pass


def answer(key, prompt, params):
    if isinstance(prompt, dict):
        prompt = str(prompt["prompt_token_ids"])
    if "fail" in prompt:
        return refused([], ValueError("as it said"))
    sample = {
        "text": f"{prompt[::-1]} {params.temperature} {key}",
        "token_ids": [1, 2, 3],
        "finish_reason": "stop",
        "stop_reason": None,
        "logprobs": None,
    }
    return {**sample, "prompt_token_ids": [1], "outputs": [sample], "error": None}


def resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def stub_microseconds():
    params = SamplingParams()
    engine = StubEngine(0)
    items = [(i, "about as long as a short question is", params) for i in range(3 * EVERY)]
    for _ in engine.generate_each(iter(items)):
        pass
    return min(b - a for a, b in pairwise(engine.seconds_at)) / EVERY * 1e6


def main(argv):
    engine = StubEngine(float(argv[0]))
    run_batch.open_engine = lambda config: engine
    status = __main__.main(argv[1:])
    own = stub_microseconds()
    costs = [(b - a) / EVERY * 1e6 - own for a, b in pairwise(engine.seconds_at)]
    sys.stderr.write(f"\n{json.dumps({'resident': engine.resident, 'microseconds': costs})}\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
