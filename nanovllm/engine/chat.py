"""render_chat: from conversations to token ids, through the checkpoint's chat template."""

import inspect
import json
import re
from types import NoneType
from typing import Any

from nanovllm.engine import faults
from nanovllm.engine.prompts import check_text, encode

# A template with such a loop reads content as a list of parts, any other one as a string.
_READS_PARTS = re.compile(r"\bfor\s+\w+\s+in\s+[\w.\[\"']*content[\"'\]]*\s*(?:[-%|]|if\b)")


def render_chat(
    tokenizer: Any,
    messages: Any,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Any = None,
    chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    on_error: str = "raise",
) -> list[Any]:
    """Token ids of one conversation or many, a list each, as the tokenizer's apply_chat_template.

    messages: a list of dicts with "role" and "content", or a list of such lists. content is a
    string or a list of {"type": "text", "text": string}. The caller's objects stay as they are.
    tools: functions that the model may call, as JSON schemas or Python functions.
    chat_template: Jinja text instead of the checkpoint's; chat_template_kwargs: its variables.
    on_error: "raise" raises the ValueError or TypeError of the first bad conversation, "return"
    puts each error in the place of its conversation.
    The template writes what special tokens there are, so the tokenizer adds none: no BOS twice.
    """
    faults.check_flag("add_generation_prompt", add_generation_prompt)
    faults.check_flag("continue_final_message", continue_final_message)
    if add_generation_prompt and continue_final_message:
        need = "needs one of them, try add_generation_prompt=False"
        got = "got True beside add_generation_prompt=True"
        raise ValueError(f"continue_final_message: {got}, {need}")
    options = {} if chat_template_kwargs is None else chat_template_kwargs
    tools = _read_tools(tools)
    template = _check_options(tokenizer, tools, chat_template, options)
    with faults.naming("messages"):
        parts = faults.listed(messages) if isinstance(messages, (list, tuple)) else []
        is_many = any(isinstance(part, (list, tuple)) for part in parts)
    conversations = parts if is_many else [messages]
    names = [f"messages[{i}]" if is_many else "messages" for i in range(len(conversations))]

    def render(name: str, conversation: Any) -> str:
        checked = _check_conversation(name, conversation)
        try:
            checked, own_tools, variables = _copied([checked, tools, options], {})
            _adapt(checked, keeps_parts=_READS_PARTS.search(template) is not None)
            return tokenizer.apply_chat_template(
                checked,
                tools=own_tools,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **variables,
            )
        except ImportError as error:
            raise ImportError(f"chat: needs jinja2, try pip install jinja2 ({error})") from error
        except BaseException as error:  # of Jinja, of the template's own checks, of what it calls
            if not faults.is_failure(error):
                raise
            what = f"{type(error).__name__}: {error!s:.300}"
            raise ValueError(f"{name}: the chat template failed with {what}") from error

    results = [faults.attempt(render, *pair) for pair in zip(names, conversations, strict=True)]
    texts = {i: text for i, text in enumerate(results) if isinstance(text, str)}
    names = [names[i] for i in texts]
    encoded = encode(tokenizer, names, list(texts.values()), add_special_tokens=False)
    for i, ids in zip(texts, encoded, strict=True):
        results[i] = ids
    return faults.settle(results, on_error)


def _copied(value: Any, made: dict[int, Any]) -> Any:
    """value with lists and dicts copied all the way down to plain ones; made: id -> its copy.

    copy.deepcopy runs the code of a subclass, which may never come back.
    """
    kind = type(value)
    if id(value) in made or not issubclass(kind, (list, tuple, dict)):
        return made.get(id(value), value)
    if issubclass(kind, dict):
        pairs: dict[Any, Any] = {}
        made[id(value)] = pairs
        pairs.update((key, _copied(part, made)) for key, part in dict.items(value))
        return pairs
    items: list[Any] = []
    made[id(value)] = items
    parts = list.__iter__(value) if issubclass(kind, list) else tuple.__iter__(value)
    items.extend(_copied(part, made) for part in parts)
    return items


def _read_tools(tools: Any) -> list[Any] | None:
    with faults.naming("tools"):
        if not (tools is None or isinstance(tools, (list, tuple))):
            raise TypeError(f"tools: got {type(tools).__name__}, needs a list of JSON schemas")
        return None if tools is None else faults.listed(tools)


def _check_options(tokenizer: Any, tools: Any, chat_template: Any, options: Any) -> str:
    """Refuse what no conversation could be rendered with; the template's text."""
    taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    with faults.naming("chat_template_kwargs"):
        if not isinstance(options, dict) or not all(isinstance(key, str) for key in options):
            kind = type(options).__name__
            raise TypeError(f"chat_template_kwargs: got {kind}, needs a dict of names to values")
        if bad := sorted(options.keys() & taken - {"documents"}):
            need = "names of the template's own variables, such as enable_thinking"
            raise ValueError(f"chat_template_kwargs: got {bad}, needs {need}")
    with faults.naming("chat_template"):
        if not (chat_template is None or isinstance(chat_template, str)):
            raise TypeError(f"chat_template: got {type(chat_template).__name__}, needs Jinja text")
    try:
        return faults.call_tokenizer(tokenizer.get_chat_template, chat_template, tools)
    except faults.TokenizerError as error:  # there is none, or none of several is the default
        need = "needs one where the checkpoint has no default"
        remedy = "chat_template=... or generate() with text that is formatted already"
        raise ValueError(f"chat_template: got None, {need}, try {remedy}") from error


def _check_conversation(name: str, conversation: Any) -> list[Any]:
    is_list = isinstance(conversation, (list, tuple))
    messages = faults.listed(conversation) if is_list else []
    if not messages:
        got = "an empty list" if is_list else type(conversation).__name__
        remedy = "[{'role': 'user', 'content': 'Hello'}]"
        raise ValueError(f"{name}: got {got}, needs messages, try {remedy}")
    for i, message in enumerate(messages):
        need = "needs {'role': a string, 'content': a string or a list of text parts}"
        if not isinstance(message, dict):
            raise TypeError(f"{name}[{i}]: got {type(message).__name__}, {need}")
        content, calls = message.get("content"), message.get("tool_calls")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{name}[{i}]: got no role or none that is a string, {need}")
        if not isinstance(calls, (list, tuple, NoneType)):
            raise ValueError(f"{name}[{i}]: got {type(calls).__name__} as tool_calls, needs a list")
        if not isinstance(content, (str, list, tuple)) and not (content is None and calls):
            raise ValueError(f"{name}[{i}]: got {type(content).__name__} as content, {need}")
        for part in faults.listed(content) if isinstance(content, (list, tuple)) else ():
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                kind = kind if isinstance(kind, str) else type(kind).__name__
                raise ValueError(f"{name}[{i}]: got a content part {kind!r:.40} or no text, {need}")
            check_text(f"{name}[{i}]", part["text"])
        if isinstance(content, str):
            check_text(f"{name}[{i}]", content)
        for j, call in enumerate(faults.listed(calls or ())):
            _check_call(f"{name}[{i}].tool_calls[{j}]", call)
    return messages


def _check_call(name: str, call: Any) -> None:
    need = "needs {'function': {'name': a string, 'arguments': JSON text or a dict}}"
    if not isinstance(call, dict):
        raise TypeError(f"{name}: got {type(call).__name__}, {need}")
    function = call.get("function")
    if not isinstance(function, dict):
        raise ValueError(f"{name}: got no function or none that is a dict, {need}")
    arguments = function.get("arguments")
    try:
        json.loads(arguments if isinstance(arguments, str) and arguments else "{}")
    except (ValueError, RecursionError) as error:
        got = f"arguments that are no JSON ({error!s:.200})"
        raise ValueError(f"{name}: got {got}, {need}, try json.dumps") from error


def _adapt(messages: list[dict[str, Any]], keeps_parts: bool) -> None:
    """Bring messages to the form that templates expect, as vLLM does."""
    for message in messages:
        if not isinstance(message.get("content"), (str, NoneType)) and not keeps_parts:
            message["content"] = "\n".join(part["text"] for part in message["content"])
        for call in message.get("tool_calls") or ():
            arguments = call["function"].get("arguments")
            if isinstance(arguments, str):  # JSON, as the OpenAI API has it
                call["function"]["arguments"] = json.loads(arguments) if arguments else {}
