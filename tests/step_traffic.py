"""One decode step of 256 rows that share 2,048 tokens, for ncu to count the memory it moves.

    ncu --target-processes application-only --profile-from-start off --clock-control none \\
        --csv --page raw --metrics dram__bytes_read.sum,dram__bytes_write.sum,lts__t_bytes.sum \\
        python tests/step_traffic.py [--plain] | python tests/step_traffic.py --sum

--plain: without cascade attention. --sum: adds up what ncu prints, by kernel: bytes from and to the
memory, and bytes that L2 handed out or took in. Qwen3-0.6B shapes, random weights, without graphs,
so that every kernel is one of its own.
"""

import collections
import csv
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def run(cascade_attention: bool) -> None:
    import numpy as np
    from bench_prefixes import shared_prefix

    from bench import write_dummy
    from nanovllm import LLM

    prompts, params = shared_prefix(np.random.default_rng(0))
    settings = dict(load_format="dummy", max_model_len=4096, num_kvcache_blocks=2048)
    with tempfile.TemporaryDirectory() as folder:
        write_dummy("0.6B", Path(folder))
        llm = LLM(folder, enforce_eager=True, cascade_attention=cascade_attention, **settings)
        for prompt in prompts:
            llm.add_request(prompt, params)
        for _ in range(12):  # the prefills, and a few decodes
            llm.step()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        llm.step()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        llm.close()


def add_up() -> None:
    lines = [line for line in sys.stdin if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    factors = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
    units = rows[0]
    memory, cache = collections.Counter(), collections.Counter()
    for row in rows[1:]:
        for name, unit in units.items():
            if name.startswith(("dram__bytes", "lts__t_bytes")):
                total = memory if name.startswith("dram") else cache
                total[row["Kernel Name"][:40]] += float(row[name].replace(",", "")) * factors[unit]
    print("    memory     L2, GB")
    cache[f"all {len(rows) - 1} kernels"] = sum(cache.values())
    memory[f"all {len(rows) - 1} kernels"] = sum(memory.values())
    for name, size in memory.most_common(9):
        print(f"{size / 1e9:10.3f} {cache[name] / 1e9:10.3f} {name}")


if __name__ == "__main__":
    add_up() if "--sum" in sys.argv else run("--plain" not in sys.argv)
