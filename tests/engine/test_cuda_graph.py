"""Which graph a step replays and what it sends there, with graphs that run their step again."""

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine import cuda_graph
from nanovllm.engine.cuda_graph import StepResult
from nanovllm.engine.prefix_groups import DecodeOrder
from tests.test_bundled import BUNDLED
from tests.test_shared_prefixes import all_tokens, random_tree


class FakeGraph:
    """Like a graph, it reads the tensors it was captured with and leaves its results in others."""

    def __init__(self, step):
        self.step = step
        self.result = StepResult(*(x.clone() for x in step()))
        self.num_replays = 0

    def replay(self):
        self.num_replays += 1
        for old, new in zip(self.result, self.step(), strict=True):
            old.copy_(new)


@pytest.fixture
def graphs(monkeypatch):
    captured = []

    def capture(step, rehearsal, pool):
        with rehearsal():
            step()
        captured.append(FakeGraph(step))
        return captured[-1], captured[-1].result

    monkeypatch.setattr(cuda_graph, "capture", capture)
    monkeypatch.setattr(cuda_graph, "_PREFILL_BUCKETS", ())
    monkeypatch.setattr(DecodeOrder, "MIN_ROWS", 2)
    monkeypatch.setattr(DecodeOrder, "MIN_SAVED", 0)
    return captured


def make(**settings):
    # Without overlap: on the CPU a step's tokens are not copied before the next one replaces them.
    settings = dict(kvcache_block_size=16, num_kvcache_blocks=400, overlap=False, **settings)
    return LLM(str(BUNDLED), device="cpu", max_model_len=512, max_num_seqs=40, **settings)


def capture_graphs(llm):
    runner = llm._runner
    runner.backend.is_graph_safe = True
    runner._capture_graphs()
    return runner.decode_graphs


@pytest.mark.parametrize("min_saved_keys", [0, 200, 1 << 30])
def test_steps_with_and_without_groups_find_their_graphs(min_saved_keys, graphs, monkeypatch):
    monkeypatch.setattr(cuda_graph, "_MIN_SAVED_KEYS", min_saved_keys)
    prompts = random_tree(50, seed=2)
    params = [
        SamplingParams((0, 0.8)[i % 2], max_tokens=3 + i, ignore_eos=True, seed=i)
        for i in range(50)
    ]
    with make() as llm:
        expected = all_tokens(llm.generate(prompts, params, use_tqdm=False))
    with make() as llm:
        decode_graphs = capture_graphs(llm)
        assert decode_graphs.sizes == [1, 2, 4, 8, 16, 24, 32, 40]
        assert sorted(decode_graphs._shared) == [32, 40]
        found = all_tokens(llm.generate(prompts, params, use_tqdm=False))
        again = all_tokens(llm.generate(prompts, params, use_tqdm=False))
    assert found == expected == again
    num_shared = sum(b._graph.num_replays for b in decode_graphs._shared.values())
    num_plain = sum(b._graph.num_replays for b in decode_graphs._plain.values())
    assert num_plain > 10 or min_saved_keys == 0
    assert num_shared > 10 or min_saved_keys == 1 << 30
    assert num_shared == 0 or min_saved_keys < 1 << 30


def test_there_is_no_second_graph_where_nothing_is_shared(graphs):
    with make(cascade_attention=False) as llm:
        assert not capture_graphs(llm)._shared
