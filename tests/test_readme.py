"""README.md says what is so: its examples run, its tables name what there is."""

import json
import re
import subprocess
import sys
from dataclasses import fields

import pytest

from nanovllm import SamplingParams
from nanovllm.outputs import RequestOutput, SampleOutput
from tests.test_bundled import BUNDLED, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
MODEL = 'LLM("Qwen/Qwen3-0.6B"'


def table(title: str) -> list[list[str]]:
    """Cells of the rows of the table whose head begins with title."""
    lines = README.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {title} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


def test_examples_run_one_after_the_other() -> None:
    """As they stand, but for the model and its device."""
    pytest.importorskip("xgrammar")
    code = "\n".join(BLOCKS)
    assert code.count(MODEL) == 1 and len(BLOCKS) == 4
    code = code.replace(MODEL, f'LLM({str(BUNDLED)!r}, device="cpu"')
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    printed = result.stdout.strip().splitlines()
    assert "2, 3, 5, 7, 11, 13, 17, 19" in result.stdout
    assert sum(line.endswith(("length", "stop")) for line in printed) >= 4
    # Line breaks are allowed between the tokens of JSON.
    text, _, reason = result.stdout[result.stdout.rindex("{") :].strip().rpartition(" ")
    assert reason in ("stop", "length")
    if reason == "stop":
        assert json.loads(text).keys() == {"city", "is_capital"}


def test_every_sampling_parameter_is_listed_with_its_default() -> None:
    listed = [(name, default) for name, default, _ in table("SamplingParams")]
    assert listed == [(f"`{f.name}`", f"`{f.default!r}`") for f in fields(SamplingParams)]
    assert all(meaning for _, _, meaning in table("SamplingParams"))


def test_every_key_of_a_result_is_named() -> None:
    start = README.index("A result is a dict")
    text = README[start : README.index("\n\n", start)]
    for key in {**SampleOutput.__annotations__, **RequestOutput.__annotations__}:
        assert f"`{key}`" in text, key


def test_every_file_is_in_the_code_map() -> None:
    named = set()
    for cell, _ in table("file"):
        folder = ""
        for name in re.findall(r"`([^`]+)`", cell):
            folder = name.rpartition("/")[0] if "/" in name else folder
            named.add(name if "/" in name or not folder else f"{folder}/{name}")
    package = ROOT / "nanovllm"
    missing = [name for name in named if not any((r / name).exists() for r in (package, ROOT))]
    assert not missing
    folders = tuple(name for name in named if name.endswith("/"))
    for path in package.rglob("*.py"):
        name = path.relative_to(package).as_posix()
        is_named = name in named or name.startswith(folders)
        assert is_named or path.name in ("__init__.py", "llm.py"), name


def test_extras_that_it_names_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    name = re.search(r'^name = "(.+)"$', project, re.MULTILINE)
    assert name is not None and f'"{name[1]}[structured]"' in README
    for extra in re.findall(r"\[([a-z-]+)\]\"", README):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra
