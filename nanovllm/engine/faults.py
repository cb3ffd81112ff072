"""Faults that are not this package's: what callers' objects and tokenizers raise, and its names."""

from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from itertools import islice
from typing import Any

from nanovllm.errors import naming


class TokenizerError(ValueError):
    """Whatever a tokenizer raised."""


def is_failure(error: BaseException) -> bool:
    """Whether something failed: a panic of the tokenizers library too, which is no Exception, but
    neither Ctrl-C nor an exit."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def call_tokenizer(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a tokenizer's function returns; TokenizerError for whatever it raises."""
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        if not is_failure(error):
            raise
        raise TokenizerError(f"{error!s:.300}") from error


def attempt(function: Callable[..., Any], name: str, *args: Any) -> Any:
    """What function(name, *args) returns, or the caller's mistake that it raises."""
    try:
        with naming(name):
            return function(name, *args)
    except (ValueError, TypeError) as error:
        return error


def attempt_each(
    function: Callable[..., Any], name: str, items: list[Any], *args: Any
) -> list[Any]:
    """attempt for each item of a list that has this name: function(name of the item, item, *args).

    Where all are good, which is usual, no names are needed.
    """
    try:
        return [function(name, item, *args) for item in items]
    except Exception:
        return [attempt(function, f"{name}[{i}]", item, *args) for i, item in enumerate(items)]


def settle(results: list[Any], on_error: Any) -> list[Any]:
    """The results with errors in their places ("return"), or none but good ones ("raise")."""
    is_text = issubclass(type(on_error), str)  # isinstance asks the caller's object
    if not is_text or str.__str__(on_error) not in ("raise", "return"):
        got = f"{str.__str__(on_error)!r:.40}" if is_text else type(on_error).__name__
        raise ValueError(f"on_error: got {got}, needs 'raise' or 'return'")
    if str.__str__(on_error) == "raise":
        for result in results:
            if isinstance(result, Exception):
                raise result
    return results


def check_flag(name: str, value: Any) -> None:
    if type(value) is not bool:
        raise TypeError(f"{name}: got {type(value).__name__}, needs True or False")


def listed(items: AbstractSequence[Any]) -> list[Any]:
    """The items of a caller's list, as many as it says that there are."""
    return list(islice(items, len(items)))
