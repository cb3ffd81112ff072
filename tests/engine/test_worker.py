"""The channel to the other ranks: what goes in comes out, whatever its size."""

import numpy as np
import pytest

from nanovllm.engine.worker import decode, encode


@pytest.mark.parametrize("shape", [(0,), (1,), (7, 3), (2, 0), (1 << 22,)])
@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.bool_])
def test_arrays_survive_a_frame(shape, dtype):
    """2^22 int32 are 16 MiB: a step message of a long prefill outgrew a 1 MiB buffer once (R31)."""
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    call, scalars, arrays = decode(encode("run", {"is_prefill": True}, {"a": array, "b": array.T}))
    assert call == "run" and scalars == {"is_prefill": True}
    assert arrays["a"].dtype == dtype and arrays["a"].shape == shape
    assert np.array_equal(arrays["a"], array) and np.array_equal(arrays["b"], array.T)


def test_scalars_survive_a_frame():
    scalars = {"path": "näme", "none": None, "n": 2**60, "x": 0.1, "nested": {"a": [1, 2]}}
    assert decode(encode("start", scalars, {})) == ("start", scalars, {})
