"""StepHandle: a launched step's results, copied to the host while the device goes on."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.layers.logprobs import Logprobs


class StepHandle:
    """What a launched step found, on its way to the host."""

    def __init__(
        self,
        tokens: torch.Tensor,
        logprobs: Logprobs | None = None,
        prompt_logprobs: Iterable[Logprobs] = (),
    ) -> None:
        """tokens: int64 [num_sampled]; may be overwritten once this returns.

        logprobs: of the special rows that ask for them, in order.
        prompt_logprobs: of the prompt pieces that ask for them, in order.
        """
        self._event: torch.cuda.Event | None = None
        self._tokens = _start_copy(tokens)
        self._logprobs = [
            Logprobs(*map(_start_copy, x)) for x in (logprobs, *prompt_logprobs) if x is not None
        ]
        self._has_logprobs = logprobs is not None
        if tokens.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def token_ids(self) -> npt.NDArray[np.int64]:
        """int64 [num_sampled], -1 where the logits were not finite; the one wait for the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._tokens.numpy()

    def logprobs(self) -> Logprobs | None:
        """As they were given, on the host; after token_ids()."""
        return self._logprobs[0] if self._has_logprobs else None

    def prompt_logprobs(self) -> list[Logprobs]:
        return self._logprobs[self._has_logprobs :]


def _start_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host, once the device has come this far."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
