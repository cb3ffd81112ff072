"""What all tests share: where kernels run, which tests need a GPU, and tiny checkpoints."""

import os

# Tests run side by side, and their tensors are tiny: more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

if not torch.cuda.is_available():
    # Triton reads this when a kernel is defined, so before the package is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest  # noqa: E402

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pytest_collection_modifyitems(items):
    num_gpus = torch.cuda.device_count()
    for item in items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1
        if item.get_closest_marker("multi_gpu") or item.get_closest_marker("gpu"):
            skip = pytest.mark.skipif(num_gpus < needed, reason=f"needs {needed} CUDA GPU(s)")
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seed():
    """Random tensors are the same in every run of a test."""
    torch.manual_seed(0)
    return 0


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """tiny_checkpoint(heads=4, ...) -> folder of a random checkpoint, Qwen3's unless it says.

    The same arguments give the same folder: copy it before changing a file. Token ids are the 256
    bytes, then `SPECIAL_TOKENS`; the model's vocabulary may be larger.
    """
    made = {}

    def make(**shape):
        key = repr(sorted(shape.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("checkpoint")
            write_checkpoint(made[key], **shape)
        return made[key]

    return make


def write_checkpoint(
    folder,
    heads=4,
    kv_heads=2,
    head_dim=16,
    hidden=64,
    intermediate=96,
    layers=2,
    vocab=259,
    tied=True,
    attention_bias=False,
    max_position=1024,
    dtype=torch.float32,
    seed=0,
    family="qwen3",
    **fields,
):
    """fields: of the family's config, by transformers' names."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if family not in ("qwen2", "mistral"):
        fields["attention_bias"] = attention_bias
    config = AutoConfig.for_model(
        family,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=max_position,
        bos_token_id=256,
        eos_token_id=258,
        pad_token_id=256,
        **fields,
    )
    model = AutoModelForCausalLM.from_config(config)
    fill_weights(model, torch.Generator().manual_seed(seed))
    model.generation_config.eos_token_id = [258, 256]
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder)


@torch.no_grad()
def fill_weights(model, generator):
    """Every layer changes the stream and the logits are not flat: greedy tokens vary, by margins
    that rounding does not reach."""
    for name, param in model.named_parameters():
        noise = torch.randn(param.shape, generator=generator)
        if name.endswith("norm.weight"):
            param.copy_(1 + 0.2 * noise)
        elif param.dim() == 1:
            param.copy_(0.3 * noise)
        elif "embed_tokens" in name or "lm_head" in name:
            param.copy_(0.4 * noise)
        else:
            param.copy_(noise / param.size(-1) ** 0.5)


def write_tokenizer(folder):
    """A byte-level BPE without merges: a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
