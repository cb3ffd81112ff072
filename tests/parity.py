"""Side-by-side runs of the engine and of transformers, for tests: greedy tokens and all logits."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams


class Greedy(NamedTuple):
    token_ids: list[int]
    logits: np.ndarray  # float32 [num_tokens, vocab_size], what each token was the argmax of

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [num_tokens], of the chosen tokens."""
        logprobs = torch.from_numpy(self.logits).log_softmax(-1)
        return logprobs[range(len(self.token_ids)), self.token_ids].numpy()


# Arguments of transformers' generate. Everything generation_config.json may ask for is set aside:
# this is the plain argmax.
PLAIN_ARGMAX = dict(do_sample=False, temperature=None, top_p=None, top_k=None, pad_token_id=0)


def load_hf(checkpoint: Path, dtype: torch.dtype, device: str = "cpu"):
    model = AutoModelForCausalLM.from_pretrained(str(checkpoint), torch_dtype=dtype)
    return model.to(device).eval()


@torch.inference_mode()
def hf_greedy(model, prompt: list[int], num_tokens: int) -> Greedy:
    """num_tokens greedy tokens of transformers' generate."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        eos_token_id=None,
        **PLAIN_ARGMAX,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = out.sequences[0, len(prompt) :].tolist()
    return Greedy(tokens, torch.cat(out.logits).float().cpu().numpy())


@torch.inference_mode()
def hf_logits(model, prompt: list[int], token_ids: list[int]) -> np.ndarray:
    """float32 [len(token_ids), vocab_size]: transformers' logits where these tokens were chosen."""
    ids = torch.tensor([prompt + token_ids[:-1]], device=model.device)
    return model(ids).logits[0, len(prompt) - 1 :].float().cpu().numpy()


@torch.inference_mode()
def hf_logits_of_all(model, prompts: list[list[int]], outputs: list[list[int]]) -> list[np.ndarray]:
    """`hf_logits` of each prompt, those of the same length in one batch.

    Where the argmax is our token at every place, transformers' greedy tokens are ours.
    """
    by_length: dict[int, list[int]] = {}
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        by_length.setdefault(len(prompt) + len(output), []).append(i)
    found: dict[int, np.ndarray] = {}
    for rows in by_length.values():
        ids = torch.tensor([prompts[i] + outputs[i][:-1] for i in rows], device=model.device)
        logits = model(ids).logits.float().cpu().numpy()
        found.update({i: x[len(prompts[i]) - 1 :] for i, x in zip(rows, logits, strict=True)})
    return [found[i] for i in range(len(prompts))]


class RecordedLLM:
    """An LLM that also keeps the logits of each token it sampled, by request."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.logits: dict[int, list[np.ndarray]] = {}
        runner = llm._runner
        launch = runner.launch

        def record_launch(batch):
            handle = launch(batch)
            logits = runner.last_result.logits.float().cpu().numpy()
            for i, seq_id in enumerate(batch.seq_ids[batch.is_sampled]):
                self.logits.setdefault(int(seq_id), []).append(logits[i])
            return handle

        runner.launch = record_launch

    def greedy(self, prompts: list[list[int]], num_tokens: int) -> list[Greedy]:
        """num_tokens greedy tokens of each prompt."""
        self.logits.clear()
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        logits = [np.stack(self.logits[seq_id]) for seq_id in sorted(self.logits)]
        return [Greedy(o["token_ids"], x) for o, x in zip(outputs, logits, strict=True)]


def assert_equal_to_hf(llm: LLM, hf, prompts: list[list[int]], num_tokens: int) -> float:
    """Every greedy token equal, log-probabilities within 1e-4; returns the largest gap."""
    gap = 0.0
    ours = RecordedLLM(llm).greedy(prompts, num_tokens)
    for prompt, mine in zip(prompts, ours, strict=True):
        theirs = hf_greedy(hf, prompt, num_tokens)
        assert mine.token_ids == theirs.token_ids, f"a prompt of {len(prompt)} tokens"
        gap = max(gap, float(np.abs(mine.logprobs - theirs.logprobs).max()))
    assert gap <= 1e-4, gap
    return gap


def compare_half_precision(
    llm: LLM, hf_half, hf_fp32, prompts, num_tokens: int
) -> dict[str, float]:
    """The honest rule for bf16 and fp16: both engines against an fp32 reference, on our tokens.

    Our error must be at most 1.10 x transformers' own in the same type (mean and 99.9th
    percentile), and where our token is not the reference's argmax, the reference's margin must be
    below twice the largest error seen: no flip without an explanation.
    """
    ours, theirs, flips = [], [], []
    for prompt, mine in zip(prompts, RecordedLLM(llm).greedy(prompts, num_tokens), strict=True):
        exact = hf_logits(hf_fp32, prompt, mine.token_ids)
        ours.append(np.abs(mine.logits - exact))
        theirs.append(np.abs(hf_logits(hf_half, prompt, mine.token_ids) - exact))
        margins = exact.max(-1) - exact[range(num_tokens), mine.token_ids]
        flips += margins[margins > 0].tolist()
    mine, his = np.concatenate(ours), np.concatenate(theirs)
    figures = {
        "mean_ratio": float(mine.mean() / his.mean()),
        "p999_ratio": float(np.quantile(mine, 0.999) / np.quantile(his, 0.999)),
        "flips": len(flips),
        "positions": len(mine),
        "worst_flip": max(flips, default=0.0) / (2 * float(mine.max())),
    }
    assert figures["mean_ratio"] <= 1.10 and figures["p999_ratio"] <= 1.10, figures
    assert figures["worst_flip"] < 1, figures
    return figures
