"""The house rules a reader relies on: who may import whom, and who may read the environment."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROOMS = {
    "jaxserve": "jaxserve",
    "models": "jaxserve.models",
    "pallas_kernels": "jaxserve.pallas_kernels",
}
HOST_ROOMS = (
    "jaxserve.types", "jaxserve.config", "jaxserve.scheduler", "jaxserve.cache", "jaxserve.sim",
    "jaxserve.obs", "jaxserve.tokenizer", "jaxserve.engine.core", "jaxserve.engine.output",
    "jaxserve.engine.async_engine", "jaxserve.server", "jaxserve.grammar",
)  # fmt: skip
DEVICE_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "orbax"}


def modules():
    """(dotted name, parsed source) of every module of the package."""
    for folder, package in ROOMS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([package, *(p for p in parts if p != "__init__")])
            yield name, ast.parse(path.read_text())


def imports(name, tree):
    """Modules imported when `name` is imported or runs, as dotted names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = name.split(".")[: -node.level] or [name]
                base = ".".join([*parent, base]).rstrip(".")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def inside(name, rooms):
    return any(name == room or name.startswith(room + ".") for room in rooms)


MODULES = list(modules())


@pytest.mark.parametrize(("name", "tree"), MODULES, ids=[name for name, _ in MODULES])
def test_imports_go_one_way(name, tree):
    used = set(imports(name, tree))
    if inside(name, ["jaxserve.pallas_kernels"]):
        wrong = [
            u
            for u in used
            if u.startswith("jaxserve") and not inside(u, ["jaxserve.pallas_kernels"])
        ]
        assert not wrong, f"kernels stand alone, but import {wrong}"
    elif inside(name, ["jaxserve.models"]):
        allowed = ["jaxserve.models", "jaxserve.pallas_kernels"]
        wrong = [u for u in used if u.startswith("jaxserve.") and not inside(u, allowed)]
        assert not wrong, f"models see kernels only, but import {wrong}"
    if inside(name, HOST_ROOMS):
        wrong = [u for u in used if u.split(".")[0] in DEVICE_LIBRARIES]
        assert not wrong, f"a host room imports {wrong}: the device runner is injected"
    if inside(name, ["jaxserve.server"]):
        allowed = [
            "jaxserve.server", "jaxserve.types", "jaxserve.config", "jaxserve.tokenizer",
            "jaxserve.engine.async_engine", "jaxserve.obs", "jaxserve.grammar",
        ]  # fmt: skip
        wrong = [u for u in used if u.startswith("jaxserve.") and not inside(u, allowed)]
        assert not wrong, f"the server sees the async engine only, but imports {wrong}"
    assert not [u for u in used if inside(u, ["tests", "tools"])]


@pytest.mark.parametrize(("name", "tree"), MODULES, ids=[name for name, _ in MODULES])
def test_environment_is_read_in_main_only(name, tree):
    if name == "jaxserve.main":
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
            pytest.fail(f"{name}:{node.lineno} reads the environment: take an argument instead")


@pytest.mark.parametrize(("name", "tree"), MODULES, ids=[name for name, _ in MODULES])
def test_no_pickle_and_no_vague_names(name, tree):
    forbidden = {"pickle", "dill", "cloudpickle", "shelve", "marshal"}
    assert not forbidden & {used.split(".")[0] for used in imports(name, tree)}
    assert name.rsplit(".", 1)[-1] not in ("utils", "helpers", "managers", "common", "misc")


def test_host_rooms_run_without_jax():
    """Importing the host rooms must not bring jax in by a detour."""
    rooms = [name for name, _ in MODULES if inside(name, HOST_ROOMS)]
    lines = [f"import {name}" for name in rooms]
    lines.append(
        "import sys; found = {'jax', 'jaxlib'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, cwd=ROOT.anchor)
