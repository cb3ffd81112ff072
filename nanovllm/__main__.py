"""The command line, `python -m nanovllm` or `nanovllm`: one command for now, run-batch."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from nanovllm.config import Config
from nanovllm.run_batch import Job, LineReader, run_batch
from nanovllm.sampling_params import SamplingParams

EPILOG = """\
Lines are {"prompt": ...}, {"messages": [...]} or {"prompt_token_ids": [...]} with any field of
SamplingParams beside it, or OpenAI's batch format. Exit status: 0, all lines have a result; 1, some
failed, and say why in the output; 2, the job did not finish; 130, interrupted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nanovllm", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    batch = commands.add_parser(
        "run-batch",
        help="complete every line of a file",
        description="Complete every line of a file; results come in the order in which they end.",
        epilog=EPILOG,
        usage="nanovllm run-batch -i IN -o OUT --model DIR [--tp N] [--FIELD VALUE ...]",
        allow_abbrev=False,
    )
    add = batch.add_argument
    add("-i", "--input", required=True, help="JSONL, or - for standard input; also .gz")
    add("-o", "--output", required=True, help="JSONL, or - for standard output; also .gz")
    add("--model", required=True, help="checkpoint directory or hub id")
    add("--resume", action="store_true", help="skip lines whose results the output has")
    add("--ray", nargs="?", const="", metavar="ADDRESS", help="on a Ray cluster, or a new one here")
    add("--replicas", type=int, default=1, help="with --ray: engines, each on --tp GPUs")
    group = batch.add_argument_group("settings of the engine, fields of Config")
    for knob in fields(Config):
        if knob.name != "model":
            _add_field(group, "config", knob.name, knob.default)
    group = batch.add_argument_group("SamplingParams of lines that do not say")
    for knob in fields(SamplingParams):
        if knob.name != "seed":  # Config's, and the line's number, are the seed of each line
            _add_field(group, "sampling", knob.name, knob.default)
    args = sys.argv[1:] if argv is None else argv
    options = parser.parse_args([_hyphened(arg) for arg in args])
    try:
        job = _job(options)
    except (TypeError, ValueError) as error:
        batch.error(str(error))
    if job.ray is None:
        return run_batch(job)
    from nanovllm.ray import run_on_ray

    return run_on_ray(job)


def _hyphened(arg: str) -> str:
    """--max_tokens=8 -> --max-tokens=8: fields may be given by their names as they are."""
    name, equals, value = arg.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if arg.startswith("--") else arg


def _add_field(group: Any, kind: str, name: str, default: Any) -> None:
    names = [f"--{name.replace('_', '-')}"]
    names += ["--tp"] if name == "tensor_parallel_size" else []
    options: dict[str, Any] = dict(
        dest=f"{kind}.{name}", default=argparse.SUPPRESS, help=f"default: {default}"
    )
    if isinstance(default, bool):
        group.add_argument(*names, action=argparse.BooleanOptionalAction, **options)
    else:
        read = str if isinstance(default, str) else _text_or_list if name == "stop" else _value
        group.add_argument(*names, type=read, metavar="VALUE", **options)


def _value(text: str) -> Any:
    """JSON where it is JSON: numbers, null, lists, objects."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _text_or_list(text: str) -> Any:
    value = _value(text)
    return value if isinstance(value, list) else text


def _job(options: argparse.Namespace) -> Job:
    """Raises ValueError or TypeError for what cannot work."""
    given = vars(options)

    def those(kind: str) -> dict[str, Any]:
        prefix = f"{kind}."
        return {k.removeprefix(prefix): v for k, v in given.items() if k.startswith(prefix)}

    defaults = those("sampling")
    LineReader(defaults)  # as lines read them
    if options.replicas < 1:
        raise ValueError(f"--replicas: got {options.replicas}, needs at least 1")
    if options.replicas > 1 and options.ray is None:
        raise ValueError("--replicas: needs --ray, which starts them")
    config = Config.from_kwargs(options.model, **those("config"))
    files = options.input, options.output
    return Job(*files, config, defaults, options.resume, options.ray, options.replicas)


if __name__ == "__main__":
    sys.exit(main())
