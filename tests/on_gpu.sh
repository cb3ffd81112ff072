#!/usr/bin/env bash
# What only a GPU can show, in pieces of less than ten minutes; each prints its figures as it goes.
#
#   tests/on_gpu.sh tests                 all tests with the marker gpu (most need flash-attn too)
#   tests/on_gpu.sh peers PEER_BENCH_DIR  peer_bench.py three times, decode steps, cold and warm start
#   tests/on_gpu.sh eights PEER_BENCH_DIR peer_bench.py on 8B shapes, likewise
#   tests/on_gpu.sh floors                bench.py's share of the floor: 0.6B, 8B, 30B-A3B
#   tests/on_gpu.sh decode                decode attention alone
#   tests/on_gpu.sh prefixes              kernels and jobs with shared prefixes, each with and without
#   tests/on_gpu.sh jobs                  run-batch against generate on 20,000 short prompts
#   tests/on_gpu.sh traffic               memory that one step moves, with shared prefixes and without
#   tests/on_gpu.sh memcheck              short runs under compute-sanitizer
#   tests/on_gpu.sh both                  two ranks that take turns on one GPU: their tests
#   tests/on_gpu.sh ranks                 two GPUs: tests, faults, speed
#
# PEER_BENCH_DIR holds peer_bench.py, make_checkpoint.py and qwen3_tokenizer.zip. ROUNDS=3 says how
# often peers and eights run. FA3=FOLDER, with flash_attn_interface in it: peers adds prefill by it.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
quiet() { grep -vE "^nanovllm |Warning|warn\(" || true; }

write_dummy() { # SIZE FOLDER
    python -c "import sys, bench; from pathlib import Path; bench.write_dummy(sys.argv[1], Path(sys.argv[2]))" "$1" "$2"
}

case ${1:-} in
tests)
    python -m pytest -q -m gpu tests -n 8 --timeout 500 -p no:cacheprovider 2>&1 |
        grep -E "^E  |^FAILED|^ERROR|passed|failed"
    ;;
peers)
    python "$2/make_checkpoint.py" 0.6B "$scratch/0.6B" --tokenizer "$2/qwen3_tokenizer.zip"
    export TRITON_CACHE_DIR=$scratch/cache
    for round in $(seq "${ROUNDS:-3}"); do
        python "$2/peer_bench.py" --engine nanovllm "$scratch/0.6B" --label "round $round" 2>&1 | quiet
    done
    python tests/bench_step.py 2>&1 | quiet
    for round in ${FA3:+$(seq "${ROUNDS:-3}")}; do
        PYTHONPATH="$PYTHONPATH:$FA3" python "$2/peer_bench.py" --engine nanovllm "$scratch/0.6B" \
            --only prefill --label "FA3, round $round" 2>&1 | quiet
    done
    ;;
eights)
    mkdir "$scratch/8B" && write_dummy 8B "$scratch/8B"
    for round in $(seq "${ROUNDS:-3}"); do
        python "$2/peer_bench.py" --engine nanovllm "$scratch/8B" --only bench single small8 \
            --kwargs '{"load_format": "dummy"}' --label "8B, round $round" 2>&1 | quiet
    done
    ;;
floors)
    for size in 0.6B 8B 30B-A3B; do
        python bench.py --dummy-weights "$size" --floor 2>&1 | quiet
    done
    ;;
decode)
    python tests/kernels/bench_kernels.py --only attention 2>&1 | quiet
    ;;
prefixes)
    python tests/kernels/bench_kernels.py --only cascade sweep_cascade 2>&1 | quiet
    python tests/bench_prefixes.py 2>&1 | quiet
    ;;
jobs)
    python "$2/make_checkpoint.py" 0.6B "$scratch/0.6B" --tokenizer "$2/qwen3_tokenizer.zip"
    python tests/bench_batch.py --model "$scratch/0.6B" 2>&1 | quiet
    ;;
traffic)
    for plain in "" --plain; do
        python tests/step_traffic.py $plain 2>&1 | quiet # what is compiled is kept
        ncu --target-processes application-only --profile-from-start off --clock-control none \
            --csv --page raw --metrics dram__bytes_read.sum,dram__bytes_write.sum,lts__t_bytes.sum \
            python tests/step_traffic.py $plain | python tests/step_traffic.py --sum
    done
    ;;
memcheck)
    cat >"$scratch/short.py" <<'EOF'
from nanovllm import LLM, SamplingParams

settings = dict(max_model_len=1024, max_num_seqs=40, num_kvcache_blocks=64)
prompts = [list(range(5, 605)), *([7 * i % 2000 + 1] * (9 * i + 1) for i in range(20))]
params = [SamplingParams(0.8, max_tokens=12, ignore_eos=True, n=n) for n in [30] + [1] * 20]
for eager in (False, True):
    with LLM("tests/assets/tiny-qwen3", enforce_eager=eager, **settings) as llm:
        print(len(llm.generate(prompts, params, use_tqdm=False)), "requests answered", flush=True)
EOF
    python "$scratch/short.py" 2>&1 | quiet # what is compiled is kept
    compute-sanitizer --tool memcheck --error-exitcode 1 python "$scratch/short.py" 2>&1 | tail -8
    ;;
both)
    export BOTH_RANKS_ON_ONE_GPU=1 PYTHONPATH="$PWD/tests/both_ranks:$PYTHONPATH"
    python -m pytest -q -m gpu tests/test_two_gpus.py -k "not memory_of_both" 2>&1 | tail -5
    ;;
ranks)
    python -m pytest -q -m gpu tests/test_two_gpus.py tests/kernels/test_all_reduce.py 2>&1 | tail -5
    NANOVLLM_FAULTS_DEVICE=cuda python -m pytest -q tests/faults/test_faults.py -n 8 --dist load \
        -k "not 4- and not side_by" 2>&1 | tail -5
    for tp in 1 2; do
        python bench.py --dummy-weights 8B --tp $tp --num-seqs 1 --input-len 100 100 \
            --output-len 512 512 2>&1 | quiet
        python bench.py --dummy-weights 0.6B --tp $tp 2>&1 | quiet
    done
    ;;
*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
