"""Side-by-side runs of the engine and of transformers, for tests: tokens and their log-probabilities."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams


def load_hf(checkpoint: Path, dtype: torch.dtype, device: str = "cpu"):
    model = AutoModelForCausalLM.from_pretrained(str(checkpoint), torch_dtype=dtype)
    return model.to(device).eval()


@torch.inference_mode()
def hf_greedy(model, prompt: list[int], num_tokens: int) -> tuple[list[int], np.ndarray]:
    """num_tokens greedy tokens of transformers' generate, and the log-probability of each."""
    ids = torch.tensor([prompt], device=model.device)
    # Everything generation_config.json may ask for is set aside: this is the plain argmax.
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        min_new_tokens=None,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = out.sequences[0, len(prompt) :].tolist()
    logprobs = torch.cat(out.logits).float().log_softmax(-1)
    return tokens, logprobs[range(len(tokens)), tokens].cpu().numpy()


class RecordedLLM:
    """An LLM that also keeps the log-probability of each token it sampled, by request."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.logprobs: dict[int, list[float]] = {}
        runner, sample = llm._runner, llm._runner.sampler.forward
        run = runner.run

        def record_logits(logits, *args):
            self._logits = logits
            return sample(logits, *args)

        def record_run(batch):
            tokens = run(batch)
            logprobs = self._logits.float().log_softmax(-1).cpu().numpy()
            for i, row in enumerate(batch.rows[batch.is_sampled]):
                seq_id = llm.scheduler.table.sequences[row].seq_id
                self.logprobs.setdefault(seq_id, []).append(float(logprobs[i, tokens[i]]))
            return tokens

        runner.sampler.forward, runner.run = record_logits, record_run

    def greedy(self, prompts: list[list[int]], num_tokens: int):
        """For each prompt its greedy tokens and the log-probability of each."""
        self.logprobs.clear()
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        logprobs = [np.array(self.logprobs[seq_id]) for seq_id in sorted(self.logprobs)]
        return [(o["token_ids"], p) for o, p in zip(outputs, logprobs, strict=True)]
