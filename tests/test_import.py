# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The package on a machine without nvidia-cutlass-dsl, without the extension and without a GPU."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import kept
import pytest

import jax_fastattn
from jax_fastattn.compilation import libraries
from jax_fastattn.ffi import registry

# Makes a module impossible to find and to import.
WITHOUT = "import sys\nfor name in ({names!r}): sys.modules[name] = None\n"
COMPILER = ("cutlass", "nvidia_cutlass_dsl", "cuda")


ROOT = Path(jax_fastattn.__file__).parents[1]


def python(code: str, without: tuple[str, ...] = (), path: tuple[Path, ...] = (ROOT,)) -> str:
    """What a new process prints that sees no GPU."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": ",".join(kept.STRICT),
    }
    code = WITHOUT.format(names=without) + textwrap.dedent(code)
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_import_and_a_call_load_neither_compiler_nor_extension_nor_start_a_backend() -> None:
    code = """
        before = set(sys.modules)  # site-packages may hold a .pth file that imports the compiler's empty outer package
        import jax_fastattn
        from jax._src import xla_bridge
        print(bool(xla_bridge._backends))
        import jax.numpy as jnp
        print(jax_fastattn.attention(*[jnp.ones((2, 5, 3, 8))] * 3).shape)
        families = ("cutlass", "cuda", "torch", "flax", "nvidia_cutlass_dsl")
        print([name for name in set(sys.modules) - before if name.split(".")[0] in families])
        print([name for name in ("_ffi", "compiler") if "jax_fastattn.ffi." + name in sys.modules])
    """
    assert python(code).splitlines() == ["False", "(2, 5, 3, 8)", "[]", "[]"]


def test_a_list_of_cases_starts_no_backend_and_traces_nothing() -> None:
    """What imports it may start processes that share a GPU, of which a client takes three quarters.

    Every test process imports it, too: when each case was traced for its shapes, that took 5 s of CPU time.
    """
    code = """
        import jax
        events = []
        jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.append(event))
        from testing.cases import gpu
        from jax._src import xla_bridge
        print(len(gpu.GPU_CASES) > 100, bool(xla_bridge._backends), events)
        jax.eval_shape(jax.jit(lambda: 1))
        print(bool(events))
    """
    assert python(code, path=(ROOT, Path(__file__).parent)).splitlines() == ["True False []", "True"]


def test_the_package_imports_nothing_of_its_tests() -> None:
    """A wheel has no tests, but pytest finds both."""
    folder = Path(__file__).parent
    known = {path.stem for path in folder.iterdir()} | {"tests"}
    used = re.compile(r"^ *(?:from|import) (\w+)", re.MULTILINE)
    sources = [*(ROOT / "jax_fastattn").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    found = {(path.name, name) for path in sources for name in used.findall(path.read_text()) if name in known}
    assert {"testing", "generators"} < known and not found


def test_without_the_compiler_everything_but_kernels_works() -> None:
    code = """
        import warnings
        import jax, jax.numpy as jnp
        from jax_fastattn import attention, explain, target_arch
        x = jnp.ones((2, 5, 3, 8), jnp.bfloat16)
        print(attention(x, x, x).shape, explain(x, x, x).implementation)
        with warnings.catch_warnings(record=True) as caught, target_arch("sm_90a"):
            warnings.simplefilter("always")
            text = jax.jit(attention).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
        print("custom_call" in text, len(caught), "nvidia-cutlass-dsl, which compiles" in str(caught[0].message))
        try:
            insist = jax.jit(lambda x: attention(x, x, x, implementation="cuda"))
            with target_arch("sm_90a"):
                insist.trace(x).lower(lowering_platforms=("cuda",))
        except NotImplementedError as error:
            print(str(error).count("  - "), "pip install" in str(error))
    """
    for without, missing in ((COMPILER, 1), ((*COMPILER, "jax_fastattn.ffi._ffi"), 2)):
        expected = ["(2, 5, 3, 8) xla", "False 1 True", f"{missing} True"]
        assert python(code, without).splitlines() == expected


def test_a_clone_that_shadows_the_installed_package_says_so(tmp_path: Path) -> None:
    """So does the error of `register_ffi_targets`, which was a bare ModuleNotFoundError."""
    clone, site = tmp_path / "clone", tmp_path / "site"
    shutil.copytree(ROOT / "jax_fastattn", clone / "jax_fastattn", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (clone / "CMakeLists.txt").touch()
    extension = site / "jax_fastattn" / "ffi" / f"_ffi{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    extension.parent.mkdir(parents=True)
    extension.touch()
    code = """
        import sys
        sys.meta_path[:] = [finder for finder in sys.meta_path if isinstance(finder, type)]  # none of `pip install -e`
        import jax_fastattn
        print(jax_fastattn.ffi.missing_parts()[0])
        try:
            jax_fastattn.register_ffi_targets()
        except ImportError as error:
            print(type(error).__name__, error)
    """
    found = python(code, path=(clone, site)).splitlines()
    assert found == [
        f"the C++ extension of jax_fastattn, built for this Python, is not in {clone / 'jax_fastattn'}, a source tree "
        f"that Python imports instead of the installed package {site / 'jax_fastattn'}; start Python in another "
        f"directory, or leave {clone} out of PYTHONPATH; or run `pip install -e {clone}`",
        f"ImportError {found[0]}",
    ]


@pytest.mark.parametrize(
    ("is_clone", "remedy"),
    [
        (True, "run `pip install -e {root}`"),
        (False, "reinstall jax_fastattn from its wheel or clone by `pip install --force-reinstall`"),
    ],
)
def test_a_package_without_its_extension_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_clone: bool, remedy: str
) -> None:
    if is_clone:
        (tmp_path / "CMakeLists.txt").touch()
    monkeypatch.setattr(registry, "__file__", str(tmp_path / "jax_fastattn" / "ffi" / "registry.py"))
    monkeypatch.setattr(libraries, "is_installed", lambda module: module == "nvidia_cutlass_dsl")
    monkeypatch.setattr(libraries, "compiler_version", lambda: "4.8.1")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (reason,) = registry.missing_parts()
    assert reason.endswith(f" is not in {tmp_path / 'jax_fastattn'}; {remedy.format(root=tmp_path)}")


def test_messages_name_only_packages_that_an_index_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extras of this package are right in a clone alone: no index has its name, which anybody may register."""
    clone = Path(__file__).parents[1]
    sources = [*(clone / "jax_fastattn").rglob("*.py"), *(clone / "csrc").glob("*.cc")]
    texts = {path.name: path.read_text() for path in sources}
    assert [name for name, text in texts.items() if "jax_fastattn[" in text] == []
    extras = tomllib.loads((clone / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    monkeypatch.setattr(libraries, "is_installed", lambda module: False)
    for extra in ("cuda13", "cuda12"):
        (compiler,) = (name for name in extras[extra] if name.startswith("nvidia-cutlass-dsl"))
        for text in (registry.missing_parts()[1], texts["libraries.cc"]):
            assert f"'{compiler}'" in text


def test_public_names() -> None:
    ours = ["attention", "attention_varlen", "explain", "paged_attention", "register_ffi_targets", "target_arch"]
    ours += ["and_masks", "block_mask", "causal", "dropout_mask", "or_masks"]
    ours += ["all_to_all_attention", "positions", "ring_attention", "unzigzag", "zigzag"]
    assert sorted(jax_fastattn.__all__) == sorted(ours)
    assert all(callable(getattr(jax_fastattn, name)) for name in jax_fastattn.__all__)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("jax_fastattn.api", "all_to_all_attention attention attention_varlen explain paged_attention positions"),
        ("jax_fastattn.api", "ring_attention unzigzag zigzag"),
        ("jax_fastattn.integrations.flax", "Packed attention_fn bind"),
        ("jax_fastattn.integrations.jax_nn", "install installed uninstall"),
        ("jax_fastattn.integrations.keras", "install installed uninstall"),
    ],
)
def test_public_names_are_imported_from_where_they_were(module: str, names: str) -> None:
    """Users' imports do not depend on the room in which a function lives."""
    found = importlib.import_module(module)
    for name in names.split():
        function = getattr(found, name)
        assert callable(function)
        assert getattr(jax_fastattn, name, function) is function


def test_dir_shows_the_public_names_alone() -> None:
    """Submodules that the package imports are its attributes too."""
    assert hasattr(jax_fastattn, "ops")
    assert dir(jax_fastattn) == sorted([*jax_fastattn.__all__, "__version__"])
    assert all(hasattr(jax_fastattn, name) for name in dir(jax_fastattn))


def test_the_version_is_that_of_the_metadata() -> None:
    """The build reads it from the package; an installed package and its metadata agree."""
    assert re.fullmatch(r"\d+\.\d+\.\d+", jax_fastattn.__version__)
    try:
        found = importlib.metadata.version("jax_fastattn")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("jax_fastattn is not installed: Python imports a source tree")
    assert found == jax_fastattn.__version__
