"""The rules of the house that a machine can check: imports, sizes, references, banned calls."""

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nanovllm"
FILES = sorted(PACKAGE.rglob("*.py"))

# 4,500 until the Triton kernels came. Planned at 760 lines they take about 1,650, since each serves
# any shape, dtype and GPU from sm_80 and keeps its reference beside it. Then came what requests ask
# for (issue 4), 2,000 lines: 23 checked parameters (300), their logits and draws (410), text with
# stop strings (160), chat and prompts (310), structured output, half of which refuses what xgrammar
# would ignore (340), and requests with streams, samples, metrics and their own errors (480). Then
# ranks that neither hang nor leak (issue 5): frames that are checked and a watch over processes.
# Then families (issue 6): five of them (190) and the defaults of their configs (30), four kinds of
# RoPE scaling (110), a loader that reads ahead and names what is wrong with a file (160), experts
# and their grouped product (450). Ranks that draw together, and sum through memory that they share
# (issue 5, 300); tokenizers opened without the import of transformers (130).
# Then bulk jobs (issue 8): lines in two formats and whatever may be wrong with them (330), files
# that survive kill -9 (160), the job and its command line (260), Ray (230), requests without end
# (70).
# Then shared prefixes that attention reads once (issue 7): groups and work lists (110), the kernel
# and the merge of its results (180), the CPU's way (60), graphs and inputs (60). Two passes over
# the rest took 470 lines out before. Then what a day of use by others found (100): errors of
# generate_each, run-batch and chat by name, interrupts that leave ranks in step. Then what the GPU
# showed (110): groups that end within a block and items of a size that fits the device (50),
# prompts by the thousand read without a name for each (30), starts that rehearse with two layers.
# Then copies between blocks in one launch where torch took one a layer and copy: 33 ms of the 490
# that 64 samples take (40), and decode programs of several heads (10). Then what two ranks on one
# GPU showed (15): an NCCL that nobody used hung their end, and the next engine with it. And threads
# that keep out of each other's requests (15, less 17 by shorter calls). Then memory that ranks
# share by the driver's own calls, as torch's way hangs where a process has its second engine (115).
# A garbage collector that no longer stops the launching of steps (26).
# Prompts of which only the last token is left begin with a decode: 18 of the 413 ms that 64 samples
# take on an H200 (34). Shared keys' block numbers held in registers, ahead of the loop: 8 of 372 ms
# (23). What a prompt shares with the last one found without hashing it: 4 ms on a slow core (16).
# Linears' slabs by what a whole step takes, 2 to 5 % of those of 1 to 32 rows (9). More than 16
# query heads of a kv head merged in turns: unrolled, 71 took minutes to compile (6). A start that
# leaves no kernel to compile in the middle of a job, with few rows and without graphs too (24).
MAX_PACKAGE_LINES = 10643
MAX_FILE_LINES = 240
MAX_FUNCTION_LINES = 60
# The exceptions, each with a limit of its own. A file holds the reference, the kernel and the
# choice between them; the body of a fused kernel is one program.
LONG_FILES = {
    "kernels.paged_attention": 378,  # decode with and without norm, RoPE and store of the new token
    "kernels.small_linear": 350,  # plain, after a norm, before a SwiGLU; its settings by shape
}
LONG_KERNELS = {
    "kernels.paged_attention._paged_attention_kernel": 158,  # new token, old ones, merges
    "kernels.qk_norm_rope._qk_norm_rope_kernel": 75,  # norm, RoPE and the store into the cache
    "kernels.small_linear._dot_kernel": 75,  # three epilogues, two ways to load, splits of K
}

# Module -> what it may import of nanovllm, and from outside the standard library. The first
# matching line counts; a name stands for the module and for everything below it.
IMPORT_TABLE: dict[str, tuple[set[str], set[str]]] = {
    "nanovllm": ({"errors", "llm", "outputs", "sampling_params"}, set()),
    "llm": ({"engine.llm_engine"}, set()),
    "__main__": ({"config", "ray", "run_batch", "sampling_params"}, set()),
    "run_batch": (
        {
            "batch_files",
            "batch_lines",
            "batch_results",
            "config",
            "engine.chat",
            "engine.request",
            "llm",
            "outputs",
            "sampling_params",
            "utils.garbage",
        },
        {"tqdm"},
    ),
    "batch_files": (set(), {"xxhash"}),
    "batch_lines": ({"sampling_params"}, set()),
    "batch_results": ({"batch_lines", "outputs", "sampling_params"}, set()),
    "ray": (
        {"batch_files", "batch_lines", "batch_results", "config", "outputs", "run_batch"},
        {"pyarrow", "ray"},
    ),
    "config": ({"errors"}, {"huggingface_hub", "transformers"}),
    "sampling_params": (set(), set()),
    "outputs": (set(), set()),
    "utils.loader": ({"utils.weight_files"}, {"torch", "tqdm"}),
    "utils.weight_files": (set(), {"torch", "safetensors"}),
    "utils.distributed": ({"utils.peer_memory"}, {"torch"}),
    "utils.garbage": (set(), set()),
    "utils.*": (set(), {"torch"}),
    "kernels.launch": (set(), {"torch", "triton"}),
    "kernels.all_reduce": ({"kernels", "utils.peer_memory"}, {"torch"}),
    "kernels.*": ({"kernels"}, {"torch"}),  # triton comes from kernels.launch, where it is optional
    "attention": ({"attention"}, {"torch"}),
    "attention.flash_attn2": ({"attention.base", "utils.context"}, {"torch", "flash_attn"}),
    "attention.flash_attn3": (
        {"attention.base", "utils.context"},
        {"torch", "flash_attn_interface"},
    ),
    "attention.*": ({"attention.base", "kernels", "utils.context"}, {"torch"}),
    "layers.*": ({"layers", "kernels", "attention", "utils"}, {"torch"}),
    "models": (set(), set()),
    "models.checks": ({"layers.linear", "layers.rotary_embedding"}, set()),
    "models.decoder": (
        {"models.checks", "layers", "kernels.norm_linear", "utils.context"},
        {"torch"},
    ),
    "models.*": ({"layers.moe", "models.checks", "models.decoder"}, {"torch"}),
    "engine.sequence": ({"outputs", "sampling_params"}, {"numpy"}),
    "engine.block_manager": ({"engine.sequence"}, {"numpy", "xxhash"}),
    "engine.batching": ({"engine.sequence"}, {"numpy"}),
    "engine.prefix_groups": ({"engine.sequence"}, {"numpy"}),
    "engine.prefix_order": (set(), set()),
    "engine.scheduler": (
        {
            "engine.batching",
            "engine.block_manager",
            "engine.prefix_groups",
            "engine.prefix_order",
            "engine.sequence",
            "outputs",
        },
        {"numpy"},
    ),
    "engine.checks": (
        {"attention", "config", "engine.placement", "layers.attention", "models", "utils"},
        {"torch"},
    ),
    "engine.log": ({"nanovllm", "engine.model_runner", "utils.distributed"}, set()),
    "engine.placement": ({"config"}, {"torch"}),
    "engine.step_handle": ({"layers.logprobs"}, {"numpy", "torch"}),
    "engine.step_loop": (
        {
            "engine.model_runner",
            "engine.request",
            "engine.scheduler",
            "engine.sequence",
            "engine.step_handle",
            "engine.worker_group",
            "errors",
        },
        set(),
    ),
    "engine.precompile": (
        {
            "nanovllm",
            "attention",
            "config",
            "engine.cuda_graph",
            "engine.model_runner",
            "engine.placement",
            "kernels.launch",
            "utils.distributed",
            "utils.peer_memory",
        },
        {"torch", "triton"},
    ),
    "engine.faults": ({"errors"}, set()),
    "engine.feed": (
        {"engine.intake", "engine.request", "engine.step_loop", "outputs", "sampling_params"},
        set(),
    ),
    "engine.params": ({"engine.faults", "sampling_params"}, set()),
    "engine.progress": ({"engine.sequence", "outputs"}, {"tqdm"}),
    "engine.request": (
        {"engine.detokenizer", "engine.faults", "engine.sequence", "outputs", "sampling_params"},
        set(),
    ),
    "engine.intake": (
        {
            "engine.faults",
            "engine.params",
            "engine.prompts",
            "engine.request",
            "engine.sequence",
            "engine.structured",
            "sampling_params",
        },
        {"numpy", "xxhash"},
    ),
    "engine.redraw": (
        {
            "engine.input_batch",
            "engine.sequence",
            "engine.structured",
            "kernels.sample",
            "layers.logits",
            "layers.logprobs",
        },
        {"numpy", "torch"},
    ),
    "engine.prompts": (
        {"engine.faults", "engine.params", "sampling_params"},
        {"numpy", "transformers"},
    ),
    "engine.tokenizer": ({"engine.faults", "engine.prompts"}, {"tokenizers"}),
    "engine.chat": ({"engine.faults", "engine.prompts"}, set()),
    "engine.detokenizer": ({"engine.faults"}, set()),
    "engine.json_schema": (set(), set()),
    "engine.structured": (
        {"engine.json_schema", "engine.tokenizer"},
        {"numpy", "torch", "xgrammar"},
    ),
    "engine.decode_state": ({"engine.sequence", "kernels.decode_step"}, {"numpy", "torch"}),
    "engine.input_batch": (
        {"engine.decode_state", "engine.sequence", "kernels.decode_step", "utils.context"},
        {"numpy", "torch"},
    ),
    "engine.row_by_row": ({"config", "engine.input_batch", "utils.context"}, {"torch"}),
    "engine.cuda_graph": (
        {
            "engine.decode_state",
            "engine.input_batch",
            "engine.prefix_groups",
            "engine.sequence",
            "utils.context",
        },
        {"numpy", "torch"},
    ),
    "engine.kv_cache": ({"attention.base", "layers.attention"}, {"numpy", "torch"}),
    "engine.model_runner": (
        {
            "attention",
            "config",
            "engine.batching",
            "engine.cuda_graph",
            "engine.decode_state",
            "engine.input_batch",
            "engine.kv_cache",
            "engine.placement",
            "engine.prefix_groups",
            "engine.redraw",
            "engine.row_by_row",
            "engine.sequence",
            "engine.step_handle",
            "kernels.copy_tokens",
            "layers.attention",
            "layers.collectives",
            "layers.logprobs",
            "layers.sampler",
            "models",
            "utils",
        },
        {"numpy", "torch"},
    ),
    "errors": (set(), set()),
    "engine.channel": (set(), {"numpy"}),
    "engine.worker": (
        {"config", "engine.channel", "engine.model_runner", "engine.sequence"},
        set(),
    ),
    "engine.worker_group": (
        {"config", "engine.channel", "engine.sequence", "errors", "utils.distributed"},
        set(),
    ),
    "engine.llm_engine": (
        {
            "nanovllm",
            "config",
            "engine",
            "errors",
            "outputs",
            "sampling_params",
            "utils",
        },
        {"torch"},
    ),
}
# These take seconds to import or need not be installed, so only a function that needs one asks.
LAZY_IMPORTS = {
    "flash_attn",
    "flash_attn_interface",
    "huggingface_hub",
    "pyarrow",
    "ray",
    "tokenizers",
    "transformers",
    "xgrammar",
}


def module_name(path: Path) -> str:
    """nanovllm/engine/scheduler.py -> engine.scheduler; the package itself is nanovllm."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "nanovllm"


MODULES = {module_name(path): path for path in FILES}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imports(tree: ast.AST) -> Iterator[str]:
    """Absolute names of what is imported anywhere below, `from a import b` as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(tree: ast.AST) -> set[str]:
    """The modules of this package that are imported, `nanovllm.` left out."""
    found = set()
    for name in imports(tree):
        if name.split(".")[0] == "nanovllm":
            inner = name.removeprefix("nanovllm").removeprefix(".")
            while inner and inner not in MODULES:
                inner = inner.rpartition(".")[0]
            found.add(inner or "nanovllm")
    return found


def outside_imports(tree: ast.AST) -> set[str]:
    names = {name.split(".")[0] for name in imports(tree)}
    return names - sys.stdlib_module_names - {"nanovllm"}


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_what_its_layer_may(module):
    pattern = next((p for p in IMPORT_TABLE if fnmatch(module, p)), None)
    is_package = MODULES[module].name == "__init__.py"
    assert pattern or is_package, f"{module} has no line in the import table"
    inside, outside = IMPORT_TABLE[pattern] if pattern else (set(), set())
    allowed = {m for m in MODULES for a in inside if m == a or m.startswith(f"{a}.")}
    assert own_imports(TREES[module]) <= allowed
    assert outside_imports(TREES[module]) <= outside


def test_every_line_of_the_import_table_is_about_something():
    for pattern in IMPORT_TABLE:
        assert any(fnmatch(module, pattern) for module in MODULES), pattern


def test_imports_go_one_way():
    graph = {m: own_imports(TREES[m]) - {"nanovllm", m} for m in MODULES if m != "nanovllm"}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.parametrize("module", MODULES)
def test_slow_and_optional_packages_are_imported_inside_functions(module):
    definitions = (ast.FunctionDef, ast.ClassDef)
    at_import = [node for node in TREES[module].body if not isinstance(node, definitions)]
    assert not outside_imports(ast.Module(at_import, [])) & LAZY_IMPORTS


def test_scheduling_never_loads_torch():
    """Checked at run time too, as a parent package could bring it in."""
    code = (
        "import sys, nanovllm.config, nanovllm.engine.prompts, nanovllm.engine.scheduler;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("script", ["bench.py", "example.py"])
def test_scripts_use_public_names_only(script):
    tree = ast.parse((ROOT / script).read_text(encoding="utf-8"))
    assert own_imports(tree) <= {"nanovllm"}


# -- size ------------------------------------------------------------------------------------------


def code_lines(source: str) -> set[int]:
    """Numbers of the lines that carry a token; comments and docstrings are free."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.OP, tokenize.NAME, tokenize.NUMBER, tokenize.STRING) or (
            tokenize.tok_name[token.type].startswith("FSTRING")
        ):
            lines.update(range(token.start[0], token.end[0] + 1))
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, owners) and ast.get_docstring(node):
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    return lines


def test_code_lines_are_those_with_a_token():
    source = '"""Doc\nstring."""\n\nx = """a\nb"""  # c\n# d\ndef f(a):\n    "doc"\n    return a\n'
    assert code_lines(source) == {4, 5, 7, 9}


def test_package_stays_small():
    total = sum(len(code_lines(path.read_text(encoding="utf-8"))) for path in FILES)
    assert total <= MAX_PACKAGE_LINES


@pytest.mark.parametrize("module", MODULES)
def test_files_and_functions_stay_small(module):
    lines = code_lines(MODULES[module].read_text(encoding="utf-8"))
    assert len(lines) <= LONG_FILES.get(module, MAX_FILE_LINES)
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.FunctionDef):
            name = f"{module}.{node.name}"
            size = len(lines & set(range(node.lineno, node.end_lineno + 1)))
            limit = MAX_FUNCTION_LINES
            if is_triton_kernel(node):
                limit = LONG_KERNELS.get(name, limit)
            assert size <= limit, f"{name} has {size} lines"


@pytest.mark.parametrize("name", [*LONG_FILES, *LONG_KERNELS])
def test_exception_to_a_size_limit_is_still_needed(name):
    """Otherwise it allows something that nobody has looked at."""
    module, _, function = (name, "", "") if name in LONG_FILES else name.rpartition(".")
    lines = code_lines(MODULES[module].read_text(encoding="utf-8"))
    if not function:
        assert len(lines) > MAX_FILE_LINES
        return
    nodes = [n for n in TREES[module].body if isinstance(n, ast.FunctionDef)]
    (node,) = [n for n in nodes if n.name == function]
    assert len(lines & set(range(node.lineno, node.end_lineno + 1))) > MAX_FUNCTION_LINES


# -- what must be there ----------------------------------------------------------------------------


@pytest.mark.parametrize("module", [name for name, tree in TREES.items() if tree.body])
def test_module_says_what_it_owns(module):
    assert ast.get_docstring(TREES[module])


@pytest.mark.parametrize("module", MODULES)
def test_every_signature_has_types(module):
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.FunctionDef) and not is_triton_kernel(node):
            args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            args += [arg for arg in (node.args.vararg, node.args.kwarg) if arg]
            untyped = [a.arg for a in args if a.annotation is None and a.arg not in ("self", "cls")]
            assert not untyped, f"{node.name}: {untyped}"
            assert node.returns is not None, node.name


@pytest.mark.parametrize("module", ["config", "sampling_params"])
def test_every_knob_has_a_comment_on_its_line(module):
    lines = MODULES[module].read_text(encoding="utf-8").splitlines()
    classes = [node for node in TREES[module].body if isinstance(node, ast.ClassDef)]
    knobs = [node for cls in classes for node in cls.body if isinstance(node, ast.AnnAssign)]
    assert knobs
    for node in knobs:
        assert "  # " in lines[node.end_lineno - 1], lines[node.end_lineno - 1]


def is_triton_kernel(node: ast.FunctionDef) -> bool:
    return any("triton" in ast.unparse(decorator) for decorator in node.decorator_list)


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("kernels.")])
def test_kernel_has_its_reference_beside_it(module):
    functions = [node for node in ast.walk(TREES[module]) if isinstance(node, ast.FunctionDef)]
    if any(is_triton_kernel(node) for node in functions):
        assert any(node.name.endswith("_ref") for node in functions)
    names = {node.name for node in functions}
    for node in functions:
        calls = {ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
        if "use_triton" in calls and not node.name.startswith("_"):
            assert f"{node.name}_ref" in names & calls, node.name


# -- what must not ---------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES)
def test_nothing_can_run_code_from_a_file_or_a_message(module):
    tree = TREES[module]
    imported = {name.split(".")[0] for name in imports(tree)}
    assert not imported & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert called not in ("eval", "exec", "compile", "__import__", "torch.load"), called
        # multiprocessing's Connection pickles what these send and receive.
        assert not called.endswith(("connection.send", "connection.recv")), called
        for keyword in node.keywords:
            if keyword.arg == "trust_remote_code":
                assert ast.unparse(keyword.value) == "False"


@pytest.mark.parametrize("module", MODULES)
def test_package_logs_and_never_prints(module):
    calls = [node for node in ast.walk(TREES[module]) if isinstance(node, ast.Call)]
    assert "print" not in {ast.unparse(node.func) for node in calls}
