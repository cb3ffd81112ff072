"""Conversations rendered as transformers renders them, and how each mistake is named."""

import copy
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from nanovllm.engine.chat import render_chat
from nanovllm.engine.prompts import PromptReader, load_tokenizer

TINY_QWEN3 = Path(__file__).parents[1] / "assets" / "tiny-qwen3"
BOS_ID = 0
# Llama's kind: the template writes the BOS, and the tokenizer adds one to any plain text.
LLAMA_LIKE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{{ '[' + message['role'] + ']' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
READS_PARTS = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ '<' + part['text'] + '>' }}{% endfor %}"
    "{% endif %}{% endfor %}"
)
# As Qwen3's: content that is no string counts as empty.
DROPS_PARTS = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}"
    "{% endif %}{% endfor %}"
)
CALL = {"type": "function", "function": {"name": "f", "arguments": ""}}
HELLO = [{"role": "user", "content": "Hello"}]
TALK = [
    {"role": "user", "content": "Hello, who are you?"},
    {"role": "assistant", "content": "A model. Привет! 你好"},
    {"role": "user", "content": "<|im_end|> in a text, and  spaces \n\n"},
]


@pytest.fixture(scope="module")
def qwen3():
    return load_tokenizer(TINY_QWEN3)


@pytest.fixture(scope="module")
def llama():
    """Letters, and <s>, which it puts before any text."""
    words = ["<s>", *(chr(c) for c in range(32, 127)), "\n"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS_ID)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    tokenizer.chat_template = LLAMA_LIKE
    assert tokenizer("a")["input_ids"][0] == BOS_ID
    return tokenizer


def text_of(tokenizer, messages, **kwargs) -> str:
    return tokenizer.decode(render_chat(tokenizer, messages, **kwargs)[0])


# -- as transformers -------------------------------------------------------------------------------


@pytest.mark.parametrize("messages", [HELLO, TALK, TALK[:2]])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"add_generation_prompt": True, "chat_template": READS_PARTS},
    ],
)
def test_token_ids_are_those_of_apply_chat_template(qwen3, messages, kwargs):
    expected = qwen3.apply_chat_template(messages, tokenize=True, return_dict=False, **kwargs)
    assert render_chat(qwen3, messages, **kwargs) == [expected]
    assert render_chat(qwen3, [messages, HELLO], **kwargs)[0] == expected


def test_bos_is_there_once(llama):
    """The template writes a BOS and the tokenizer would add another (R50)."""
    (ids,) = render_chat(llama, HELLO)
    assert ids.count(BOS_ID) == 1 and ids[0] == BOS_ID
    assert ids == llama.apply_chat_template(
        HELLO, tokenize=True, return_dict=False, add_generation_prompt=True
    )
    reader = PromptReader(llama, len(llama), 100)
    text = llama.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert [reader.read(x)[0].tolist() for x in (ids, text)] == [ids, ids]


def test_no_bos_is_added_where_the_template_writes_none(llama):
    (ids,) = render_chat(llama, HELLO, chat_template="{{ messages[0].content }}")
    assert ids == llama("Hello", add_special_tokens=False)["input_ids"] and BOS_ID not in ids


def test_many_conversations_keep_their_order(qwen3):
    batch = [HELLO, TALK, tuple(HELLO), TALK[:1]]
    assert render_chat(qwen3, batch) == [render_chat(qwen3, x)[0] for x in batch]


def test_template_gets_its_own_variables(qwen3):
    template = "{{ 'thinks' if enable_thinking else 'acts' }}{{ documents }}"
    kwargs = {"enable_thinking": True, "documents": [{"text": "D"}]}
    text = text_of(qwen3, HELLO, chat_template=template, chat_template_kwargs=kwargs)
    assert text.startswith("thinks") and "D" in text
    assert text_of(qwen3, HELLO, chat_template=template).startswith("acts")


def test_tools_reach_the_template_as_schemas(qwen3):
    def add(a: int) -> int:
        """Add one.

        Args:
            a: the number
        """
        return a + 1

    schema = {"type": "function", "function": {"name": "f", "parameters": {}}}
    template = "{% for tool in tools %}{{ tool.function.name }};{% endfor %}"
    assert text_of(qwen3, HELLO, tools=[schema, add], chat_template=template) == "f;add;"


def test_named_template_of_several_is_found(qwen3):
    tokenizer = copy.deepcopy(qwen3)
    tokenizer.chat_template = {"default": "D", "tool_use": "T", "other": "O"}
    assert text_of(tokenizer, HELLO) == "D"
    assert text_of(tokenizer, HELLO, tools=[]) == "T"
    assert text_of(tokenizer, HELLO, chat_template="other") == "O"


# -- content ---------------------------------------------------------------------------------------

PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}
]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (None, "<|im_start|>user\nA\nB<|im_end|>\n<|im_start|>assistant\n"),
        (DROPS_PARTS, "A\nB"),
        (READS_PARTS, "<A><B>"),
        (READS_PARTS.replace("message['content'] %}{{ '<", "message.content -%}{{ '<"), "<A><B>"),
        (
            READS_PARTS.replace("message['content'] %}{{ '<", "message.content if 1%}{{ '<"),
            "<A><B>",
        ),
    ],
)
def test_parts_are_joined_unless_the_template_reads_them(qwen3, template, text):
    """Qwen3's own template takes a list for no content and drops it in silence."""
    assert text_of(qwen3, PARTS, chat_template=template) == text


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_arguments_of_a_call_may_be_json_and_its_content_missing(qwen3, arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
    template = "{{ messages[-1].tool_calls[0].function.arguments | tojson }}"
    assert text_of(qwen3, messages, chat_template=template) == '{"a": 1}'
    assert call["function"]["arguments"] == arguments


def test_nothing_of_the_caller_is_changed(qwen3):
    """Templates of some releases of transformers write into the messages they are given."""

    def change(messages, tools, **kwargs):
        variable = kwargs["v"]
        messages[0]["content"] = messages[0]["more"]["a"] = tools[0]["b"] = variable["c"] = "new"
        messages.append(1)
        return "x"

    tokenizer = copy.deepcopy(qwen3)
    tokenizer.apply_chat_template = change
    kwargs = {"tools": [{}], "chat_template_kwargs": {"v": {}}}
    messages = [{**PARTS[0], "more": {}}]
    before = copy.deepcopy((messages, kwargs))
    assert render_chat(tokenizer, messages, **kwargs) == [qwen3("x")["input_ids"]]
    assert (messages, kwargs) == before


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "^messages: got NoneType, needs messages"),
        ("Hello", "^messages: got str, needs messages"),
        (HELLO[0], "^messages: got dict, needs messages"),
        (5, "^messages: got int"),
        ([], "^messages: got an empty list"),
        ([HELLO, []], r"^messages\[1\]: got an empty list"),
        ([HELLO, HELLO[0]], r"^messages\[1\]: got dict, needs messages"),
        (["Hello"], r"^messages\[0\]: got str, needs {'role'"),
        ([*HELLO, HELLO], r"^messages\[0\]: got dict, needs messages"),
        ([HELLO, [*HELLO, None]], r"^messages\[1\]\[1\]: got NoneType"),
        ([{"content": "A"}], r"^messages\[0\]: got no role"),
        ([{"role": 5, "content": "A"}], r"^messages\[0\]: got no role or none that is a string"),
        ([*HELLO, {"role": "user"}], r"^messages\[1\]: got NoneType as content"),
        ([{"role": "user", "content": 5}], r"^messages\[0\]: got int as content"),
        ([{"role": "user", "content": b"A"}], r"^messages\[0\]: got bytes as content"),
        ([{"role": "user", "content": ["A"]}], r"^messages\[0\]: got a content part 'str'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"^messages\[0\]: got a content part"),
        ([{"role": "user", "content": [{"type": 5}]}], r"^messages\[0\]: got a content part 'int'"),
        (
            [*HELLO, {"role": "user", "content": "A\ud800"}],
            r"^messages\[1\]: got a string with a lone surrogate at 1, needs valid Unicode",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}],
            r"^messages\[0\]: got a string with a lone surrogate at 0, needs valid Unicode",
        ),
        ([{"role": "\ud800", "content": "A"}], "^messages: got a string with a lone surrogate"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            r"^messages\[0\]: got a content part 'image_url'",
        ),
        (
            [{"role": "a", "content": NotImplemented}],
            r"^messages\[0\]: got NotImplementedType as content, needs {'role'",
        ),
        (
            [{"role": "a", "tool_calls": NotImplemented}],
            r"^messages\[0\]: got NotImplementedType as tool_calls, needs a list",
        ),
        (
            [{"role": "a", "content": "A", "tool_calls": NotImplemented}],
            r"^messages\[0\]: got NotImplementedType as tool_calls, needs a list",
        ),
        (
            [*HELLO, {"role": "a", "tool_calls": ["x"]}],
            r"^messages\[1\]\.tool_calls\[0\]: got str, needs {'function': ",
        ),
        (
            [{"role": "a", "tool_calls": [CALL, {"name": "f"}]}],
            r"^messages\[0\]\.tool_calls\[1\]: got no function or none that is a dict, needs",
        ),
        (
            [{"role": "a", "tool_calls": [{"function": "f"}]}],
            r"^messages\[0\]\.tool_calls\[0\]: got no function or none that is a dict, needs",
        ),
        (
            [{"role": "a", "tool_calls": [{"function": {"arguments": "{"}}]}],
            r"^messages\[0\]\.tool_calls\[0\]: got arguments that are no JSON .*, needs {'func",
        ),
    ],
)
@pytest.mark.filterwarnings("error:NotImplemented:DeprecationWarning")
def test_bad_messages_are_named(qwen3, messages, message):
    with pytest.raises((ValueError, TypeError), match=message):
        render_chat(qwen3, messages)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tools": "search"}, "^tools: got str"),
        ({"tools": 5}, "^tools: got int"),
        ({"chat_template": 5}, "^chat_template: got int"),
        ({"chat_template": "{% for %}"}, "with TemplateSyntaxError"),
        ({"chat_template": "{{ messages.x.y }}"}, "with UndefinedError"),
        ({"chat_template": "{{ 1 / 0 }}"}, "with ZeroDivisionError"),
        ({"chat_template": "{{ messages.append(1) }}"}, "with SecurityError"),
        ({"chat_template_kwargs": 5}, "^chat_template_kwargs: got"),
        ({"chat_template_kwargs": {5: 1}}, "^chat_template_kwargs: got"),
        (
            {"chat_template_kwargs": {"tokenize": True}},
            r"^chat_template_kwargs: got \['tokenize'\]",
        ),
        ({"chat_template_kwargs": {"truncation": 1, "messages": 1}}, r"got \['messages', 'trunc"),
        ({"continue_final_message": True}, "^continue_final_message: got True beside"),
        ({"on_error": "ignore"}, "^on_error: got 'ignore', needs"),
    ],
)
def test_bad_options_are_named(qwen3, kwargs, message):
    with pytest.raises((ValueError, TypeError), match=message):
        render_chat(qwen3, HELLO, **kwargs)


def test_refusal_of_the_template_is_told(llama):
    with pytest.raises(
        ValueError, match=r"^messages\[1\]: .* with TemplateError: .*must alternate"
    ):
        render_chat(llama, [HELLO, HELLO * 2])


def test_checkpoint_without_template_needs_one(qwen3):
    tokenizer = copy.deepcopy(qwen3)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="^chat_template: got None, needs one"):
        render_chat(tokenizer, HELLO)
    assert text_of(tokenizer, HELLO, chat_template="A") == "A"


def test_missing_jinja_is_a_sentence_with_the_command(qwen3, monkeypatch):
    def fail(*args, **kwargs):
        raise ImportError("apply_chat_template requires jinja2 to be installed.")

    monkeypatch.setattr(type(qwen3), "apply_chat_template", fail)
    with pytest.raises(ImportError, match="needs jinja2, try pip install jinja2"):
        render_chat(qwen3, HELLO, on_error="return")


def test_bad_conversations_leave_the_others_alone(llama):
    surrogate = [{"role": "user", "content": "A\ud800"}]
    batch = [HELLO, [], HELLO * 2, 5, surrogate, [*HELLO, {}], HELLO]
    results = render_chat(llama, batch, on_error="return")
    assert results[0] == results[6] == render_chat(llama, HELLO)[0]
    for i in (1, 2, 3, 4, 5):
        assert isinstance(results[i], (ValueError, TypeError))
        assert str(results[i]).startswith(f"messages[{i}]")
    assert render_chat(llama, [5, HELLO], on_error="return")[1] == results[0]


def test_errors_keep_their_places_on_the_way_through_the_reader(llama):
    results = render_chat(llama, [HELLO, HELLO * 2], on_error="return")
    reader = PromptReader(llama, len(llama), 100)
    ids, error = reader.read(results, on_error="return")
    assert ids.tolist() == results[0] and error is results[1]


class PanicException(BaseException):
    """As the tokenizers library, written in Rust, has it: no Exception."""


@pytest.mark.parametrize("name", ["apply_chat_template", "get_chat_template"])
@pytest.mark.parametrize(
    "error, kind",
    [
        (PanicException("no"), ValueError),
        (KeyboardInterrupt("template"), KeyboardInterrupt),
        (SystemExit("template"), SystemExit),
    ],
)
def test_panic_under_a_template_is_an_error_and_an_interrupt_is_not(
    name, error, kind, qwen3, monkeypatch
):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(type(qwen3), name, fail)
    with pytest.raises(kind, match="template"):
        render_chat(qwen3, HELLO)


def test_bundled_template_is_what_the_tests_think(qwen3):
    config = json.loads((TINY_QWEN3 / "tokenizer_config.json").read_text())
    assert qwen3.chat_template == config["chat_template"]
