"""Who may import whom: read off the source files, so that a lazy import inside a function counts as well."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PACKAGES = {"statelm_jax": "statelm_jax", "env": "statelm_jax.env", "train": "statelm_jax.train"}
"""Source folder -> the name it is imported by."""

HOST_ROOMS = {
    "statelm_jax.types": "records",
    "statelm_jax.errors": "records",
    "statelm_jax.config": "config",
    "statelm_jax.tokenizer": "tokenizer",
    "statelm_jax.chat": "chat",
    "statelm_jax.lenient_json": "chat",
    "statelm_jax.memory": "memory",
    "statelm_jax.env": "env",
}
"""Module or package -> room. What the library holds beyond these is the device room."""

MAY_IMPORT = {
    "records": {"records"},
    "config": {"records", "config"},
    "tokenizer": {"records", "config", "tokenizer"},
    "chat": {"records", "config", "tokenizer", "chat"},
    "memory": {"records", "config", "tokenizer", "memory"},
    "env": {"records", "config", "tokenizer", "chat", "memory", "env"},
    "device": {"records", "config", "device"},
    "train": {"records", "config", "tokenizer", "chat", "memory", "env", "device", "train"},
}

DEVICE_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorstore", "torch"}


def module_name(path: Path) -> str:
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    parts = [part for part in rest if part != "__init__"]
    return ".".join([PACKAGES[folder], *parts])


def room_of(module: str) -> str:
    if module == "statelm_jax.train" or module.startswith("statelm_jax.train."):
        return "train"
    for name, room in HOST_ROOMS.items():
        if module == name or module.startswith(name + "."):
            return room
    return "records" if module == "statelm_jax" else "device"


SOURCES = {module_name(path): path for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py"))}
"""Every module of the distribution -> its file."""


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(module, line) of every import in `tree`; `from a import b` gives `a.b` where that is one of our modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (full if full in SOURCES else base), node.lineno


def parse(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


def offences(allowed: object) -> list[str]:
    """`file:line imports module` for every import that `allowed(importer, imported)` refuses."""
    assert callable(allowed)
    return [
        f"{SOURCES[module].relative_to(ROOT)}:{line} imports {imported}"
        for module in SOURCES
        for imported, line in imports(parse(module))
        if not allowed(module, imported)
    ]


def test_every_room_has_files() -> None:
    """The walk is not blind: it finds the modules of every room (else all claims below would hold of nothing)."""
    assert {room_of(module) for module in SOURCES} == set(MAY_IMPORT)


def test_rooms_import_only_the_rooms_below_them() -> None:
    def allowed(module: str, imported: str) -> bool:
        ours = imported == "statelm_jax" or imported.startswith("statelm_jax.")
        return not ours or room_of(imported) in MAY_IMPORT[room_of(module)]

    assert offences(allowed) == []


def test_host_rooms_never_name_a_device_library() -> None:
    def allowed(module: str, imported: str) -> bool:
        host = room_of(module) not in ("device", "train")
        return not (host and imported.split(".")[0] in DEVICE_LIBRARIES)

    assert offences(allowed) == []


def test_imports_are_absolute_and_by_installed_name() -> None:
    assert offences(lambda _, imported: imported.split(".")[0] not in ("", *PACKAGES.keys() - {"statelm_jax"})) == []


def test_transformers_is_imported_only_where_it_is_used() -> None:
    """It takes seconds to import: never at the top of a module."""
    tops = [
        f"{module}: {imported}"
        for module in SOURCES
        for statement in parse(module).body
        for imported, _ in imports(statement)
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and imported.split(".")[0] == "transformers"
        and not (isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test))
    ]
    assert tops == []


BLOCKER = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocker())
for module in {modules!r}:
    importlib.import_module(module)
print(*sorted(sys.modules))
"""


@pytest.fixture(scope="module")
def loaded_without_jax() -> set[str]:
    """sys.modules of a process that imported every host module while device libraries could not be imported."""
    hosts = [module for module in SOURCES if room_of(module) not in ("device", "train")]
    program = BLOCKER.format(blocked=DEVICE_LIBRARIES, modules=hosts)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_every_host_module_imports_in_a_process_without_jax(loaded_without_jax: set[str]) -> None:
    assert {"statelm_jax.types", "statelm_jax.env", "statelm_jax.memory"} <= loaded_without_jax
    assert not {name for name in loaded_without_jax if name.split(".")[0] in DEVICE_LIBRARIES}


def test_importing_the_environment_loads_no_slow_library(loaded_without_jax: set[str]) -> None:
    assert not {"transformers", "matplotlib", "huggingface_hub"} & loaded_without_jax
