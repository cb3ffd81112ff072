"""Which JSON schemas and regexes a grammar can hold an output to, checked before compiling.

xgrammar passes over the words that it does not implement, or not beside others, and the output then
breaks the schema that it came from. Those are refused here; the rest is left for xgrammar to judge.
"""

import json
import re
from itertools import combinations
from types import NoneType
from typing import Any

MAX_CHARS = 200_000  # of a specification; plain ones of that size compile in seconds
MAX_DEPTH = 64  # of a schema; compiling takes the third power of it

_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": NoneType,
    "array": list,
    "object": dict,
}
_LENGTHS = {"minLength", "maxLength"}
_FORMATS = set(
    "date time date-time duration email hostname ipv4 ipv6 uuid uri uri-reference uri-template"
    " json-pointer relative-json-pointer".split()
)  # xgrammar takes any other for none
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
# What the grammar holds an output to, by type.
_HELD = {
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"pattern", "format", *_LENGTHS},
    "integer": {"multipleOf", *_BOUNDS},
    "number": _BOUNDS,
}
_IMPLIED = {"properties": "object", "items": "array"}  # types that need not be named
_UNIONS = {"anyOf", "oneOf", "allOf"}
_ALONE = {"$ref", "enum", "const", *_UNIONS}  # words that hold when no other stands beside them
_NOT_HELD_IF_TRUE = {"uniqueItems", "additionalItems"} | {
    f"unevaluated{parts}" for parts in ("Items", "Properties")
}
_NOT_HELD = _NOT_HELD_IF_TRUE.union(
    "not if then else contains minContains maxContains patternProperties propertyNames"
    " dependentRequired dependentSchemas dependencies $dynamicRef $recursiveRef".split()
)
_KEYWORDS = {"type"}.union(_ALONE, _NOT_HELD, *_HELD.values())
_SHAPES: dict[type | tuple[type, ...], set[str]] = {
    int: {low + part for low in ("min", "max") for part in ("Items", "Properties", "Length")},
    (int, float): _BOUNDS,
    str: {"$ref", "pattern", "format"},
    list: {"enum", "required", "prefixItems", *_UNIONS},
    dict: {"properties"},
}


def read_schema(schema: Any) -> str:
    """The schema as text for xgrammar; ValueError if it cannot be read or held to."""
    try:
        root = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
        text = json.dumps(root, allow_nan=False)  # one document, numbers that JSON has
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json_schema: cannot be read as JSON ({error})") from error
    if len(text) > MAX_CHARS:
        raise ValueError(f"json_schema: got {len(text)} characters, needs at most {MAX_CHARS}")
    try:
        _Checker(root).check(root, 0)
    except ValueError as error:
        raise ValueError(f"json_schema: {error}") from error
    return text


def check_regex(name: str, regex: str) -> None:
    """ValueError for what xgrammar would take in another sense than everyone else."""
    for escape in re.findall(r"\\(.)", regex, re.DOTALL):
        if escape.isascii() and escape.isalpha() and escape not in "dDwWsSnrtfvxucbBpPk":
            raise ValueError(f"{name}: got the unknown escape \\{escape} in {regex!r:.100}")
    # Escapes and character classes away, an anchor is an anchor.
    plain = re.sub(r"\\.|\[\^?\]?(\\.|[^\]\\])*\]", "x", regex, flags=re.DOTALL)
    if "^" in plain[1:] or "$" in plain[:-1]:
        raise ValueError(f"{name}: needs ^ and $ at the ends only, got {regex!r:.100}")


class _Checker:
    """Walks a schema with all it refers to."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.seen: set[int] = set()

    def check(self, node: Any, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise ValueError(f"is nested deeper than {MAX_DEPTH}")
        if node is True or id(node) in self.seen:
            return
        if not isinstance(node, dict):
            raise ValueError(f"got {node!r:.100} for a schema, needs an object")
        self.seen.add(id(node))
        _check_shapes(node)
        _check_words(node)
        _check_values(node)
        for part in self._parts(node):
            self.check(part, depth + 1)
        for a, b in combinations(node.get("oneOf", []), 2):
            if not self._are_distinct(a, b, MAX_DEPTH):
                raise ValueError("oneOf: a value may fit two of them, try anyOf")

    def _parts(self, node: dict[str, Any]) -> list[Any]:
        """The schemas that this one is made of, or refers to."""
        parts = [*node.get("properties", {}).values(), *node.get("prefixItems", [])]
        parts += [part for word in sorted(_UNIONS) for part in node.get(word, [])]
        words = ("items", "additionalProperties")
        parts += [node[w] for w in words if node.get(w, False) is not False]
        return parts + ([self._resolve(node)] if "$ref" in node else [])

    def _resolve(self, node: Any) -> Any:
        """What a schema refers to, or itself."""
        if not isinstance(node, dict) or "$ref" not in node:
            return node
        start, *names = node["$ref"].split("/")
        found = self.root if start == "#" else None
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        if not isinstance(found, dict):
            raise ValueError(f"$ref: {node['$ref']!r:.100} is not an object in this schema")
        return found

    def _are_distinct(self, a: Any, b: Any, depth: int) -> bool:
        """Whether certainly no value fits both."""
        a, b = self._resolve(a), self._resolve(b)
        if depth == 0 or not (isinstance(a, dict) and isinstance(b, dict)):
            return False
        if _values(a) and _values(b):
            return not {json.dumps(v) for v in _values(a)} & {json.dumps(v) for v in _values(b)}
        if (shared := _types(a) & _types(b)) != {"object"}:
            return not shared
        return any(
            self._are_distinct(a["properties"][name], b["properties"][name], depth - 1)
            for name in set(a.get("required", [])) & set(b.get("required", []))
        )


def _check_shapes(node: dict[str, Any]) -> None:
    for shape, words in _SHAPES.items():
        for word in sorted(words & node.keys()):
            value = node[word]
            if not isinstance(value, shape) or isinstance(value, bool):
                raise ValueError(f"{word}: got {value!r:.100}, needs another type")
            if shape is int and isinstance(value, int) and value < 0:
                raise ValueError(f"{word}: got {value}, needs at least 0")
            if shape is list and word != "required" and not value:
                raise ValueError(f"{word}: got none, needs at least one")


def _check_words(node: dict[str, Any]) -> None:
    words = _KEYWORDS & node.keys()
    words -= {word for word in words & _NOT_HELD_IF_TRUE if node[word] is False}
    types = node.get("type", [_IMPLIED[word] for word in _IMPLIED if word in node][:1])
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or any(t not in list(_TYPES) for t in types):
        raise ValueError(f"type: got {types!r:.100}, needs one or more of {', '.join(_TYPES)}")
    if "type" in node and not types:
        raise ValueError("type: got none, needs at least one")
    held = {"type"}.union(*(_HELD.get(t, set()) for t in types))
    alone = words & _ALONE
    if len(alone) == 1:
        held = alone | ({"type"} if alone <= {"enum", "const"} else set())
    if others := sorted(words - held):
        where = "/".join(sorted(alone) or types) or "no type"
        raise ValueError(f"an output cannot be held to {', '.join(others)} beside {where}")
    if len(words & {"pattern", "format"}) + bool(words & _LENGTHS) > 1:
        raise ValueError("needs one of pattern, format and the lengths, not several")


def _check_values(node: dict[str, Any]) -> None:
    types = _types(node)
    for value in _values(node):
        kinds = {t for t in types if isinstance(value, _TYPES[t])}
        if not kinds or (isinstance(value, bool) and "boolean" not in kinds):
            raise ValueError(f"{value!r:.100} is not of the type beside it")
    missing = set(map(str, node.get("required", []))) - set(node.get("properties", {}))
    if missing:
        raise ValueError(f"required: {', '.join(sorted(missing))} not among the properties")
    if len(node.get("allOf", [None])) != 1:
        raise ValueError("allOf: needs a single schema, try merging them")
    if "multipleOf" in node:
        if node["multipleOf"] not in range(1, 1025) or "number" in types or _BOUNDS & node.keys():
            raise ValueError("multipleOf: needs 1 to 1024, of integers without bounds")
    if "number" in types:
        _check_bounds({word: node[word] for word in _BOUNDS & node.keys()})
    if node.get("format", "date") not in _FORMATS:
        got, need = f"{node['format']!r:.40}", ", ".join(sorted(_FORMATS))
        raise ValueError(f"format: an output cannot be held to {got}, needs one of {need}")
    if "pattern" in node:
        check_regex("pattern", node["pattern"])


def _check_bounds(bounds: dict[str, float]) -> None:
    """xgrammar writes a number between bounds with six decimals, and none at all if none fits."""
    if any(round(bound, 6) != bound for bound in bounds.values()):
        raise ValueError(f"got {bounds}, needs bounds of at most six decimals")
    low = max((v for w, v in bounds.items() if w.endswith("inimum")), default=None)
    high = min((v for w, v in bounds.items() if w.endswith("aximum")), default=None)
    if low is not None and high is not None and not low + 1e-5 < high:
        raise ValueError(f"got {bounds}, needs a wider range, try const")


def _values(node: dict[str, Any]) -> list[Any]:
    return [node["const"]] if "const" in node else node.get("enum", [])


def _types(node: dict[str, Any]) -> set[str]:
    """The types that a value may have; an integer is a number too."""
    types = node.get("type", list(_TYPES))
    found = set(types if isinstance(types, list) else [types])
    return found | {"integer"} if "number" in found else found
