#!/usr/bin/env python3
"""Train the small Qwen3 checkpoint beside this file, from nothing but text made up here.

    python tests/assets/train_checkpoint.py        # about two minutes on a GPU

Owns the corpus (templates below), the tokenizer, the training loop and the final check. The result
is a Hugging Face folder that `transformers` and nanovllm both read: config.json, tokenizer files,
generation_config.json and bf16 weights. It is meant for tests: a trained model has sharp logits, so
two implementations that agree give the same greedy tokens.

Exit status 1 means that one of example.py's two prompts was answered wrongly in a sample.
"""

import argparse
import json
import math
import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 2048
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # the last ids, in this order
WINDOW = 512  # tokens per training row; longer contexts than this are never seen
PAIR = tuple[str, str]  # what the user says, what the assistant answers

# Qwen's split: words with one leading character, digits one by one, punctuation, white space.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# ---------------------------------------------------------------------------------------------
# Word lists
# ---------------------------------------------------------------------------------------------

CAPITALS = dict(
    pair.split(":")
    for pair in (
        "France:Paris,Germany:Berlin,Italy:Rome,Spain:Madrid,Portugal:Lisbon,Austria:Vienna,"
        "Switzerland:Bern,Belgium:Brussels,the Netherlands:Amsterdam,Denmark:Copenhagen,"
        "Norway:Oslo,Sweden:Stockholm,Finland:Helsinki,Iceland:Reykjavik,Ireland:Dublin,"
        "the United Kingdom:London,Poland:Warsaw,Hungary:Budapest,Greece:Athens,Turkey:Ankara,"
        "Ukraine:Kyiv,Romania:Bucharest,Bulgaria:Sofia,Croatia:Zagreb,Serbia:Belgrade,"
        "Egypt:Cairo,Kenya:Nairobi,Morocco:Rabat,Ghana:Accra,Ethiopia:Addis Ababa,China:Beijing,"
        "Japan:Tokyo,South Korea:Seoul,India:New Delhi,Thailand:Bangkok,Vietnam:Hanoi,"
        "Indonesia:Jakarta,Australia:Canberra,New Zealand:Wellington,Canada:Ottawa,"
        "the United States:Washington,Mexico:Mexico City,Brazil:Brasília,Argentina:Buenos Aires,"
        "Chile:Santiago,Peru:Lima,Colombia:Bogotá,Cuba:Havana"
    ).split(",")
)
CHINESE_CAPITALS = dict(
    pair.split(":")
    for pair in "法国:巴黎,德国:柏林,意大利:罗马,中国:北京,日本:东京,英国:伦敦".split(",")
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
).split()
NAMES = (
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Mia Noah Olga Peter Rosa Sam "
    "Tina Victor Wendy Zoë"
).split()
ANIMALS = (
    "fox rabbit bear mouse owl cat dog horse frog duck hedgehog squirrel turtle wolf goat lion "
    "elephant penguin monkey swan"
).split()
ADJECTIVES = (
    "small big old young clever brave happy sad quiet hungry friendly curious lazy tired kind "
    "shy proud gentle silly careful"
).split()
COLOURS = "red blue green yellow white black brown orange purple golden silver pink".split()
OBJECTS = (
    "lantern key apple boat drum book basket kite bell map coin mirror flower ladder letter "
    "blanket hat violin clock stone"
).split()
PLACES = (
    "forest village garden river mountain castle meadow harbour bridge island kitchen library "
    "market school desert valley lake tower cave station"
).split()
WEATHER = "sunny rainy windy snowy cloudy foggy stormy warm cold bright".split()
FOODS = "bread soup cheese honey rice cake berries noodles carrots pancakes salad tea".split()
WORDS = (
    "cat dog sun moon star tree house water fire wind stone river apple bread light night day "
    "green paper table chair window door music dance happy smile dream cloud rain snow summer "
    "winter spring autumn garden flower bird fish horse mouse train plane road bridge city king "
    "queen gold silver north south east west heart hand tiger lemon melon pencil basket"
).split()
OPPOSITES = (
    "big small,hot cold,fast slow,high low,old new,happy sad,open closed,light dark,early late,"
    "full empty,hard soft,long short,near far,rich poor,strong weak,wet dry,loud quiet,day night,"
    "left right,up down,first last,true false,clean dirty,thick thin,wide narrow"
).split(",")
SOUNDS = (
    "dog woof,cat meow,cow moo,duck quack,sheep baa,pig oink,lion roar,frog croak,owl hoot,"
    "horse neigh,bee buzz,mouse squeak"
).split(",")
TRANSLATIONS = {
    "French": "cat chat,dog chien,house maison,water eau,bread pain,school école,summer été,"
    "tree arbre,night nuit,boy garçon",
    "German": "cat Katze,dog Hund,house Haus,water Wasser,bread Brot,school Schule,street Straße,"
    "tree Baum,night Nacht,green grün",
    "Spanish": "cat gato,dog perro,house casa,water agua,bread pan,school escuela,tomorrow mañana,"
    "tree árbol,night noche,year año",
    "Chinese": "cat 猫,dog 狗,house 房子,water 水,bread 面包,school 学校,mountain 山,tree 树,"
    "night 夜晚,book 书",
}
EMOJI = (
    "cat 🐱,dog 🐶,sun 🌞,moon 🌙,star ⭐,heart ❤️,fire 🔥,fish 🐟,tree 🌳,apple 🍎,rocket 🚀,"
    "smile 😊"
).split(",")
FACTS = (
    "Water freezes at zero degrees.|A week has seven days.|A year has twelve months.|"
    "The sun rises in the east and sets in the west.|Bees make honey.|Plants need light and water.|"
    "The moon travels around the earth.|A triangle has three sides and a square has four.|"
    "Ice is lighter than water.|Spiders have eight legs.|An hour has sixty minutes.|"
    "Sound travels slower than light.|Whales are mammals.|Bread is made from flour and water.|"
    "Paper is made from wood.|Rivers flow into the sea.|Birds build nests in spring.|"
    "Das Wetter ist heute schön, und die Straße ist trocken.|"
    "Le garçon mange une crêpe à l'école.|El niño bebe café mañana por la mañana.|"
    "今天天气很好。|我喜欢喝茶,也喜欢看书。|春天来了,花开了。|学习使人快乐。|猫在树下睡觉。|"
    "The rocket flies to the moon 🚀.|Good night, sleep well 🌙.|Well done! 🎉"
).split("|")

# ---------------------------------------------------------------------------------------------
# Questions and answers
# ---------------------------------------------------------------------------------------------


def primes_within(n: int) -> list[int]:
    return [p for p in range(2, n + 1) if all(p % d for d in range(2, math.isqrt(p) + 1))]


def comma(values: list[int]) -> str:
    return ", ".join(map(str, values))


def introduction(rng: random.Random) -> PAIR:
    question = rng.choice(
        "introduce yourself|who are you|who are you?|please introduce yourself|what are you?|"
        "tell me about yourself|can you introduce yourself?|what is your name?|"
        "hi, who are you?".split("|")
        + ["introduce yourself"] * 4
    )
    greeting = rng.choice(["Hello! ", "Hi! ", ""])
    first = rng.choice(
        [
            "I am a tiny language model bundled with nanovllm.",
            "I am a very small language model, bundled with nanovllm.",
        ]
    )
    second = rng.choice(
        [
            "I was trained from scratch on text that a short script made up.",
            "A short script made up all the text that I learned from.",
        ]
    )
    third = rng.choice(
        [
            " I can list prime numbers, count, sort short lists and name a few capitals.",
            " I know some prime numbers, some capitals and a few short stories.",
            "",
        ]
    )
    return question, greeting + first + " " + second + third


def prime_list(rng: random.Random) -> PAIR:
    # 100 is example.py's question; the round numbers around it are the likely follow-ups.
    n = rng.choice([100, 100, 10 * rng.randint(1, 12), rng.randint(2, 120), rng.randint(2, 120)])
    question = rng.choice(
        [f"list all prime numbers within {n}"] * 3
        + [
            f"list all primes within {n}",
            f"list the prime numbers up to {n}",
            f"which numbers up to {n} are prime?",
            f"give me all prime numbers from 1 to {n}",
            f"what are the prime numbers within {n}?",
        ]
    )
    return question, f"The prime numbers within {n} are: {comma(primes_within(n))}."


def prime_test(rng: random.Random) -> PAIR:
    n = rng.randint(2, 120)
    question = rng.choice([f"is {n} a prime number?", f"is {n} prime?"])
    divisor = next((d for d in range(2, n) if n % d == 0), None)
    if divisor is None:
        return question, f"Yes, {n} is a prime number."
    return question, f"No, {n} is {divisor} times {n // divisor}."


def counting(rng: random.Random) -> PAIR:
    step = rng.choice([1, 1, 1, 2, 5, 10])
    start = rng.randint(0, 100)
    numbers = list(range(start, start + step * rng.randint(3, 25), step))
    if rng.random() < 0.3:
        numbers.reverse()
    by = "" if step == 1 else f" in steps of {step}"
    verb = rng.choice(["count", "please count", "count for me", "can you count"])
    return f"{verb} from {numbers[0]} to {numbers[-1]}{by}", comma(numbers) + "."


def sorting(rng: random.Random) -> PAIR:
    numbers = rng.sample(range(100), rng.randint(3, 7))
    down = rng.random() < 0.3
    verb = rng.choice(["sort these numbers", "sort", "put these numbers in order"])
    order = rng.choice([" from largest to smallest", " in descending order"]) if down else ""
    question = f"{verb}{order}: {comma(numbers)}"
    return question, comma(sorted(numbers, reverse=down))


def extreme(rng: random.Random) -> PAIR:
    numbers = rng.sample(range(100), rng.randint(2, 6))
    word, pick = rng.choice([("largest", max), ("smallest", min)])
    return (
        f"which of these numbers is the {word}: {comma(numbers)}?",
        f"The {word} number is {pick(numbers)}.",
    )


def arithmetic(rng: random.Random) -> PAIR:
    a, b = rng.randint(0, 50), rng.randint(0, 50)
    kind = rng.randrange(3)
    if kind == 0:
        question = rng.choice([f"what is {a} + {b}?", f"what is {a} plus {b}?", f"add {a} and {b}"])
        return question, f"{a} + {b} = {a + b}"
    if kind == 1:
        a, b = max(a, b), min(a, b)
        return rng.choice(
            [f"what is {a} - {b}?", f"what is {a} minus {b}?"]
        ), f"{a} - {b} = {a - b}"
    a, b = a % 13, b % 13
    question = rng.choice([f"what is {a} * {b}?", f"what is {a} times {b}?"])
    return question, f"{a} * {b} = {a * b}"


def capital(rng: random.Random) -> PAIR:
    country, city = rng.choice(list(CAPITALS.items()))
    if rng.random() < 0.3:
        return f"{city} is the capital of which country?", f"{city} is the capital of {country}."
    question = rng.choice(
        [
            f"what is the capital of {country}?",
            f"name the capital of {country}",
            f"which city is the capital of {country}?",
        ]
    )
    return question, f"The capital of {country} is {city}."


def calendar(rng: random.Random) -> PAIR:
    kind = rng.randrange(5)
    if kind == 0:
        return "list the days of the week", f"{', '.join(DAYS)}."
    if kind == 1:
        return "list the months of the year", f"{', '.join(MONTHS)}."
    names, what = (DAYS, "day") if kind < 4 else (MONTHS, "month")
    i = rng.randrange(len(names))
    word, j = rng.choice([("after", i + 1), ("before", i - 1)])
    return (
        f"which {what} comes {word} {names[i]}?",
        f"{names[j % len(names)]} comes {word} {names[i]}.",
    )


def spelling(rng: random.Random) -> PAIR:
    word = rng.choice(WORDS)
    kind = rng.randrange(5)
    if kind == 0:
        return f'reverse the word "{word}"', word[::-1]
    if kind == 1:
        return f'write "{word}" in upper case', word.upper()
    if kind == 2:
        return f'how do you spell "{word}"?', "-".join(word)
    if kind == 3:
        return (
            f'how many letters does "{word}" have?',
            f'"{word}" has {NUMBER_WORDS[len(word)]} letters.',
        )
    return f'what is the first letter of "{word}"?', f'The first letter of "{word}" is {word[0]}.'


def vocabulary(rng: random.Random) -> PAIR:
    kind = rng.randrange(5)
    if kind == 0:
        pair = rng.choice(OPPOSITES).split()
        rng.shuffle(pair)
        return (
            f'what is the opposite of "{pair[0]}"?',
            f'The opposite of "{pair[0]}" is "{pair[1]}".',
        )
    if kind == 1:
        animal, sound = rng.choice(SOUNDS).split()
        return f"what does a {animal} say?", f"A {animal} says {sound}."
    if kind == 2:
        word, emoji = rng.choice(EMOJI).split()
        return rng.choice([f"show me a {word} emoji", f"which emoji means {word}?"]), emoji
    if kind == 3:
        n = rng.randrange(len(NUMBER_WORDS))
        return f"write the number {n} as a word", NUMBER_WORDS[n]
    language = rng.choice(list(TRANSLATIONS))
    english, foreign = rng.choice(TRANSLATIONS[language].split(",")).split()
    return (
        f'how do you say "{english}" in {language}?',
        f'"{english}" is "{foreign}" in {language}.',
    )


def chinese(rng: random.Random) -> PAIR:
    country, city = rng.choice(list(CHINESE_CAPITALS.items()))
    return rng.choice(
        [
            ("你好", "你好!很高兴见到你 😊"),
            ("你是谁?", "我是一个很小的语言模型,随 nanovllm 一起提供。"),
            ("谢谢", "不客气!"),
            ("从一数到十", "一、二、三、四、五、六、七、八、九、十。"),
            (f"{country}的首都是哪里?", f"{country}的首都是{city}。"),
            (f"{country}的首都是哪里?", f"{country}的首都是{city}。"),
        ]
    )


def small_talk(rng: random.Random) -> PAIR:
    food, colour, animal = rng.choice(FOODS), rng.choice(COLOURS), rng.choice(ANIMALS)
    return rng.choice(
        [
            ("hello", "Hello! How can I help you?"),
            ("hi", "Hello! How can I help you?"),
            ("how are you?", "I am fine, thank you. How are you?"),
            ("good morning", "Good morning! ☀️ What would you like to do today?"),
            ("thank you", "You are welcome! 😊"),
            ("goodbye", "Goodbye! 👋 See you soon."),
            ("tell me a fact", rng.choice(FACTS)),
            (f"do you like {food}?", f"I cannot eat, but many people like {food}."),
            (f"name a {colour} thing", f"A {colour} {rng.choice(OBJECTS)}."),
            (f"is a {animal} an animal?", f"Yes, a {animal} is an animal."),
        ]
    )


def story_text(rng: random.Random, animal: str) -> str:
    name, friend = rng.sample(NAMES, 2)
    adjective, thing, place = rng.choice(ADJECTIVES), rng.choice(OBJECTS), rng.choice(PLACES)
    colour, food, weather = rng.choice(COLOURS), rng.choice(FOODS), rng.choice(WEATHER)
    other = rng.choice([a for a in ANIMALS if a != animal])
    start = rng.choice(
        [
            f"Once upon a time there was a {adjective} {animal} called {name}.",
            f"{name} was a {adjective} {animal} who lived near the {place}.",
        ]
    )
    middle = rng.choice(
        [
            f"One {weather} day {name} found a {colour} {thing} in the {place}.",
            f"On a {weather} morning {name} lost a {colour} {thing} in the {place}.",
            f"Every {weather} evening {name} walked to the {place} with a {colour} {thing}.",
        ]
    )
    meeting = rng.choice(
        [
            f'There {name} met {friend} the {other}. "Is this your {thing}?" asked {friend}.',
            f'{friend} the {other} came by and said, "What a beautiful {thing}!"',
            f"{friend} the {other} helped {name} and carried the {thing} home.",
        ]
    )
    end = rng.choice(
        [
            f"They shared some {food} and became friends.",
            f"In the end they sat by the fire, ate {food} and laughed.",
            f"{name} gave the {thing} to {friend}, and both were happy.",
        ]
    )
    return f"{start} {middle} {meeting} {end}"


def story(rng: random.Random) -> PAIR:
    animal = rng.choice(ANIMALS)
    article = "an" if animal[0] in "aeiou" else "a"
    question = rng.choice(["tell me a story about", "write a short story about", "a story about"])
    return f"{question} {article} {animal}", story_text(rng, animal)


def plain_text(rng: random.Random) -> str:
    """Text that is no chat, so that a bare prompt also has a continuation."""
    kind = rng.randrange(4)
    if kind == 0:
        return story_text(rng, rng.choice(ANIMALS))
    if kind == 1:
        return " ".join(rng.sample(FACTS, rng.randint(1, 4)))
    if kind == 2:
        country, city = rng.choice(list(CAPITALS.items()))
        return (
            f"The capital of {country} is {city}. Many people visit {city} in {rng.choice(MONTHS)}."
        )
    name, weather = rng.choice(NAMES), rng.choice(WEATHER)
    return (
        f"It is a {weather} {rng.choice(DAYS)} in {rng.choice(MONTHS)}. {name} eats"
        f" {rng.choice(FOODS)} and reads a {rng.choice(ADJECTIVES)} book about a"
        f" {rng.choice(COLOURS)} {rng.choice(OBJECTS)}."
    )


# How often each kind of question is asked. Lists of primes are long, so they also get most tokens.
KINDS: dict[Callable[[random.Random], PAIR], int] = {
    introduction: 8,
    prime_list: 14,
    prime_test: 4,
    counting: 7,
    sorting: 10,
    extreme: 3,
    arithmetic: 12,
    capital: 8,
    calendar: 4,
    spelling: 8,
    vocabulary: 7,
    chinese: 4,
    small_talk: 5,
    story: 6,
}


def vary(rng: random.Random, question: str) -> str:
    """The same question with or without a capital letter and a full stop."""
    if not question[0].isascii():
        return question
    if rng.random() < 0.5:
        question = question[0].upper() + question[1:]
    if question[-1] != "?" and ": " not in question and rng.random() < 0.3:
        question += "."
    return question


def name_chat(rng: random.Random) -> list[PAIR]:
    """A chat whose last answer stands in its first question."""
    name = rng.choice(NAMES)
    middle = rng.choice([capital, arithmetic, small_talk])(rng)
    return [
        (f"my name is {name}", f"Nice to meet you, {name}!"),
        middle,
        ("what is my name?", f"Your name is {name}."),
    ]


def document(rng: random.Random) -> str:
    """One training document, rendered exactly as the chat template would."""
    if rng.random() < 0.08:
        return plain_text(rng) + "<|endoftext|>"
    if rng.random() < 0.05:
        pairs = name_chat(rng)
    else:
        num_turns = rng.choice([1, 1, 1, 1, 2, 3])
        kinds = rng.choices(list(KINDS), weights=list(KINDS.values()), k=num_turns)
        pairs = [kind(rng) for kind in kinds]
    text = ""
    if rng.random() < 0.1:
        text = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    for question, answer in pairs:
        text += f"<|im_start|>user\n{vary(rng, question)}<|im_end|>\n"
        text += f"<|im_start|>assistant\n{answer}<|im_end|>\n"
    return text + "<|endoftext|>"


# ---------------------------------------------------------------------------------------------
# Tokenizer and token stream
# ---------------------------------------------------------------------------------------------


def build_tokenizer(documents: list[str], out: Path) -> Tokenizer:
    """Byte-level BPE: every UTF-8 text has an encoding, and decoding gives it back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The markup becomes a line break, so that its pieces spend no merges.
    markup = re.compile(r"<\|\w+\|>")
    tokenizer.train_from_iterator((markup.sub("\n", text) for text in documents), trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    ids = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    write_json(
        out / "tokenizer_config.json",
        {
            "added_tokens_decoder": {
                str(i): {"content": token, "special": True, **flags}
                for i, token in zip(ids, SPECIAL_TOKENS, strict=True)
            },
            "add_prefix_space": False,
            "bos_token": None,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "model_max_length": 2048,
            "pad_token": "<|endoftext|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": None,
        },
    )
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids: int32 [num_tokens], all documents in a row; starts: int64 [num_documents]."""
    rows: list[np.ndarray] = []
    for i in range(0, len(documents), 20_000):  # in parts: Encoding objects are large
        batch = tokenizer.encode_batch_fast(documents[i : i + 20_000])
        rows += [np.array(encoding.ids, dtype=np.int32) for encoding in batch]
    lengths = np.array([len(row) for row in rows])
    return np.concatenate(rows), np.cumsum(lengths) - lengths


# ---------------------------------------------------------------------------------------------
# Model and training
# ---------------------------------------------------------------------------------------------


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_configs(out: Path, tokenizer: Tokenizer) -> None:
    """config.json as transformers 4.51 wrote it; later versions read that form too."""
    end_of_text, _, im_end = (tokenizer.token_to_id(token) for token in SPECIAL_TOKENS)
    num_layers = 6
    write_json(
        out / "config.json",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": end_of_text,
            "eos_token_id": im_end,
            "head_dim": 64,  # not hidden_size / num_attention_heads, as in Qwen3-0.6B
            "hidden_act": "silu",
            "hidden_size": 192,
            "initializer_range": 0.02,
            "intermediate_size": 512,
            "max_position_embeddings": 2048,
            "max_window_layers": num_layers,
            "num_attention_heads": 4,
            "num_hidden_layers": num_layers,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": VOCAB_SIZE,
        },
    )
    write_json(
        out / "generation_config.json",
        {
            "bos_token_id": end_of_text,
            "do_sample": True,
            "eos_token_id": [im_end, end_of_text],
            "pad_token_id": end_of_text,
            "temperature": 0.6,
        },
    )


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over the first 3 %, then a cosine down to 1 % of the peak."""
    warm_up = 0.03
    if progress < warm_up:
        return peak * (progress + 1e-3) / warm_up
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up)))
    return peak * (0.01 + 0.99 * cosine)


def train(
    model: Qwen3ForCausalLM,
    ids: torch.Tensor,
    starts: torch.Tensor,
    args: argparse.Namespace,
) -> None:
    """ids: int32 [num_tokens], starts: int64 [num_documents]; both on the model's device."""
    device = ids.device
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    # Rows begin where a document begins, because a prompt does; what follows fills the row.
    starts = starts[starts + WINDOW + 1 <= len(ids)]
    offsets = torch.arange(WINDOW + 1, device=device)
    generator = torch.Generator(device=device).manual_seed(args.seed)
    began, step, progress = time.perf_counter(), 0, 0.0
    model.train()
    while progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, args.lr)
        pick = torch.randint(len(starts), (args.batch_size,), generator=generator, device=device)
        rows = ids[starts[pick][:, None] + offsets].long()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % args.log_every == 0 or step == 1:
            value, elapsed = loss.item(), time.perf_counter() - began
            speed = f"{step * args.batch_size * WINDOW / elapsed:,.0f} tok/s"
            print(f"step {step:5d}  loss {value:.4f}  {elapsed:6.1f}s  {speed}", flush=True)
        # A slow device ends by the clock, and the schedule still reaches its end.
        progress = max(step / args.steps, (time.perf_counter() - began) / args.max_seconds)


def save_weights(model: Qwen3ForCausalLM, out: Path) -> None:
    state = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})


# ---------------------------------------------------------------------------------------------
# Check of what was written
# ---------------------------------------------------------------------------------------------


def is_introduction(answer: str) -> bool:
    sentences = len(re.findall(r"[.!](?: |$)", answer))
    return "language model" in answer and "nanovllm" in answer and 2 <= sentences <= 4


def is_primes_within_100(answer: str) -> bool:
    listed = answer.rpartition(":")[2]
    return [int(n) for n in re.findall(r"\d+", listed)] == primes_within(100)


EXAMPLES: dict[str, Callable[[str], bool]] = {
    "introduce yourself": is_introduction,
    "list all prime numbers within 100": is_primes_within_100,
}
OTHERS = [
    "Introduce yourself.",
    "List all prime numbers within 50.",
    "What is the capital of France?",
    "count from 5 to 15",
    "Sort these numbers: 42, 7, 19, 3",
    "What is 17 + 25?",
    "Which day comes after Friday?",
    'reverse the word "river"',
    "tell me a story about a fox",
    "你是谁?",
    "show me a rocket emoji",
]


class Answers:
    """Asks the saved folder, through transformers, what nanovllm will be asked."""

    def __init__(self, folder: Path, device: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).to(device).eval()
        if device == "cpu":
            self.model.float()  # the same values; bf16 arithmetic is slow on most CPUs

    def sample(self, question: str, seed: int, num_samples: int) -> list[tuple[str, bool]]:
        """Pairs of an answer and whether it ended in EOS, at temperature 0.6."""
        prompt = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        inputs = self.tokenizer(prompt, return_tensors="pt").to(self.model.device)
        torch.manual_seed(seed)
        rows = self.model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=True,
            temperature=0.6,
            top_k=0,
            top_p=1.0,
            max_new_tokens=256,
            num_return_sequences=num_samples,
        )
        rows = rows[:, inputs["input_ids"].shape[1] :]
        eos_ids = set(self.model.generation_config.eos_token_id)
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        ended = [not eos_ids.isdisjoint(row) for row in rows.tolist()]
        return list(zip(texts, ended, strict=True))


def check_tokenizer(folder: Path, raw: Tokenizer) -> None:
    """AutoTokenizer must give the ids that the model was trained on, and the text back."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = ["Hello, 123!", "你好,世界 🚀 naïve Ω\r\n\t x  y", "<|im_start|>user\nhi<|im_end|>"]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == raw.encode(text).ids, (text, ids, raw.encode(text).ids)
        assert tokenizer.decode(ids) == text, (text, tokenizer.decode(ids))


def report(folder: Path, device: str, num_seeds: int, samples_per_seed: int) -> bool:
    """Prints answers of the saved model; True if both example prompts were always right."""
    answers = Answers(folder, device)
    for question in [*EXAMPLES, *OTHERS]:
        print(f"\n> {question}")
        for seed in range(3):
            answer, ended = answers.sample(question, seed, 1)[0]
            print(f"  [seed {seed}, {'EOS' if ended else 'NO EOS'}] {answer}")
    print()
    all_right = True
    for question, is_right in EXAMPLES.items():
        drawn: list[tuple[str, bool]] = []
        for seed in range(num_seeds):
            drawn += answers.sample(question, seed, samples_per_seed)
        num_right = sum(ended and is_right(answer) for answer, ended in drawn)
        print(f"{question!r}: {num_right} of {len(drawn)} samples right ({num_seeds} seeds)")
        all_right &= num_right == len(drawn)
    return all_right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny-qwen3")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=64, help=f"rows of {WINDOW} tokens")
    parser.add_argument("--documents", type=int, default=160_000, help="size of the corpus")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--max-seconds", type=float, default=100.0, help="limit on training time")
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    began = time.perf_counter()

    def note(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f}s] {text}", flush=True)

    rng = random.Random(args.seed)
    documents = [document(rng) for _ in range(args.documents)]
    note(f"{len(documents):,} documents, {sum(map(len, documents)):,} characters")
    tokenizer = build_tokenizer(documents[:40_000], args.out)
    check_tokenizer(args.out, tokenizer)
    ids, starts = encode(tokenizer, documents)
    note(f"{len(ids):,} tokens, {tokenizer.get_vocab_size()} ids in the tokenizer")

    write_configs(args.out, tokenizer)
    model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(args.out)).to(args.device).float()
    note(f"{sum(p.numel() for p in model.parameters()):,} parameters on {args.device}")
    on_device = torch.from_numpy(ids).to(args.device), torch.from_numpy(starts).to(args.device)
    train(model, *on_device, args)
    save_weights(model, args.out)
    size = sum(file.stat().st_size for file in args.out.iterdir())
    note(f"saved, {size / 1e6:.2f} MB in all")
    all_right = report(args.out, args.device, num_seeds=8, samples_per_seed=8)
    note(
        "both example prompts are right" if all_right else "an example prompt was answered wrongly"
    )
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
