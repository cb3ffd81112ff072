"""The current context: one at a time, and gone afterwards whatever happened."""

import pytest
import torch

from nanovllm.utils.context import Context, get_context, use_context


def make_context():
    return Context(is_prefill=True, slot_mapping=torch.zeros(1, dtype=torch.int32))


def test_context_is_current_inside_and_gone_after():
    ctx = make_context()
    with use_context(ctx) as entered:
        assert entered is ctx and get_context() is ctx
    with pytest.raises(RuntimeError, match="use_context"):
        get_context()


def test_context_is_gone_after_an_exception():
    with pytest.raises(KeyError), use_context(make_context()):
        raise KeyError
    with use_context(make_context()):
        pass


def test_nesting_is_refused_and_leaves_the_outer_one_current():
    outer = make_context()
    with use_context(outer):
        with pytest.raises(RuntimeError, match="one step at a time"):
            with use_context(make_context()):
                pass
        assert get_context() is outer


def test_context_cannot_be_changed():
    with pytest.raises(AttributeError):
        make_context().is_prefill = False


def test_contexts_differ_though_their_fields_are_equal():
    """What a backend derived from one step must not be taken for another's."""
    slots = torch.zeros(1, dtype=torch.int32)
    assert Context(is_prefill=True, slot_mapping=slots) != Context(
        is_prefill=True, slot_mapping=slots
    )
