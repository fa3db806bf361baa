"""The structure: a file imports from lower floors only, the kernels know nothing of jaxllm, and importing is cheap."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FLOORS = [
    {"section"},
    {"sharding", "hardware", "hlo", "hub", "fp8"},
    {"attention", "exchange", "optim", "nf4"},
    {"bnb", "noise"},
    {"lora"},
    {"frozen"},
    {"linear"},
    {"grouped_linear"},
    {"layers", "moe"},
    {"models", "models.decoder", "models.llama", "models.mixtral"},
    {
        "state",
        "loss",
        "data",
        "data.formats",
        "data.sources",
        "data.chat",
        "data.render",
        "data.cache",
        "data.workers",
        "data.workshop",
        "data.summary",
        "data.pipeline",
        "data.batch",
        "checkpoint",
        "hf",
        "metrics",
    },
    {"config", "peft"},
    {"weights"},
    {"step"},
    {"generate", "plan", "convert", "data.__main__"},
    {"train", "__main__"},
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
# Only these may import the kernels.
KERNEL_USERS = {"attention", "grouped_linear", "data.batch"}


def modules():
    for path in sorted((ROOT / "jaxllm").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "jaxllm").with_suffix("").parts).removesuffix(".__init__")
        if name != "__init__":
            yield name, path


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_module_has_a_floor():
    assert {name for name, _ in modules()} == set(FLOOR)


@pytest.mark.parametrize("name,path", list(modules()), ids=lambda v: v if isinstance(v, str) else "")
def test_imports_go_down(name, path):
    package = name.split(".")[0]
    for target in imported(path):
        if target.startswith("jaxllm_kernels"):
            assert name in KERNEL_USERS, f"{name} imports the kernels"
        if target.startswith("jaxllm.") and target.removeprefix("jaxllm.") in FLOOR:
            other = target.removeprefix("jaxllm.")
            if other.split(".")[0] != package:
                assert FLOOR[other] < FLOOR[name], (
                    f"{name} (floor {FLOOR[name]}) imports {other} (floor {FLOOR[other]})"
                )


def test_the_kernels_know_no_jaxllm_and_no_flax():
    for path in (ROOT / "kernels").rglob("*.py"):
        for target in imported(path):
            assert target.split(".")[0] not in ("jaxllm", "flax", "pydantic"), f"{path.name} imports {target}"
    assert not (ROOT / "kernels" / "__init__.py").exists(), (
        "a package called `kernels` shadows the one that transformers looks for"
    )


def run(code, cwd=ROOT):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd)


def test_importing_jaxllm_loads_nothing_heavy():
    heavy = ["grain", "orbax", "transformers", "tokenizers", "torch", "jax_triton", "tensorboardX", "jax", "flax"]
    done = run(f"import sys, jaxllm; print([m for m in {heavy!r} if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_state_and_a_step_need_no_data_or_tokenizer_library():
    heavy = ["grain", "transformers", "tokenizers", "torch", "tensorboardX"]
    code = f"import sys, jaxllm; jaxllm.init_state, jaxllm.load_config, jaxllm.Batch; print([m for m in {heavy!r} if m in sys.modules])"
    done = run(code)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("command", ["train", "plan", "convert"])
def test_help_is_quick_and_starts_no_accelerator(command):
    code = f"import sys; sys.argv = ['x', '--help']\nimport runpy\ntry: runpy.run_module('jaxllm.{command}', run_name='__main__')\n"
    done = run(code + "except SystemExit: pass\nprint('jax' in sys.modules)")
    assert done.stdout.strip().endswith("False"), done.stdout + done.stderr
