"""How often Python looks for garbage: rarely while requests run, and as before once they have."""

import gc
import threading

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.utils.garbage import collected_rarely


@pytest.fixture(autouse=True)
def usual():
    before = gc.get_threshold()
    gc.set_threshold(700, 11, 12)
    yield (700, 11, 12)
    gc.set_threshold(*before)


def test_rarely_inside_and_as_before_outside(usual):
    with collected_rarely():
        assert gc.get_threshold() == (50_000, 11, 12)
        with collected_rarely():
            assert gc.get_threshold() == (50_000, 11, 12)
        assert gc.get_threshold() == (50_000, 11, 12)
    assert gc.get_threshold() == usual
    with pytest.raises(KeyboardInterrupt), collected_rarely():
        raise KeyboardInterrupt
    assert gc.get_threshold() == usual


@pytest.mark.parametrize("threshold", [(0, 10, 10), (100_000, 5, 5)])
def test_a_caller_who_wants_less_gets_less(threshold):
    gc.set_threshold(*threshold)
    with collected_rarely():
        assert gc.get_threshold() == threshold
    assert gc.get_threshold() == threshold


def test_of_two_threads_the_last_to_leave_restores(usual):
    is_inside, may_leave = threading.Event(), threading.Event()

    def stay():
        with collected_rarely():
            is_inside.set()
            may_leave.wait()

    with collected_rarely():
        other = threading.Thread(target=stay, daemon=True)
        other.start()
        is_inside.wait()
    assert gc.get_threshold()[0] == 50_000
    may_leave.set()
    other.join()
    assert gc.get_threshold() == usual


def test_nothing_is_collected_while_hundreds_of_requests_run(tiny_checkpoint, usual):
    """But when all have ended, if at all."""
    started_at = []

    def note(phase, info):
        if phase == "start":
            started_at.append(gc.get_threshold())

    def run(generate, *args):
        gc.collect()
        del started_at[:]
        gc.callbacks.append(note)
        try:
            generate(*args, [[1, 2, 3]] * 400, SamplingParams(max_tokens=1), use_tqdm=False)
        finally:
            gc.callbacks.remove(note)

    with LLM(str(tiny_checkpoint()), device="cpu", num_kvcache_blocks=64) as llm:
        run(llm.generate)
        assert started_at in ([], [usual]) and gc.get_threshold() == usual
        run(LLM.generate.__wrapped__, llm)  # the same without
        assert len(started_at) > 3
