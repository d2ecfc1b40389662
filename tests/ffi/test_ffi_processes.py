# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What only a process of its own shows: imports, warm caches, exported programs, libraries that are missing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import stand_in

import jax_fastattn

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("nvidia_cutlass_dsl") is None, reason="nvidia-cutlass-dsl is not installed"
)

# A process that launches on the CPU through the stand-in named by its first argument.
PREAMBLE = """
import sys
from pathlib import Path
import jax
import jax.numpy as jnp
import pytest
import stand_in
from jax_fastattn import ffi
from jax_fastattn.compilation import libraries

def use(library):
    library = stand_in.install(Path(library))
    stand_in.ctypes.c_int.in_dll(library, "set_num_buffers").value = 6
    return library

def count(library, name):
    return stand_in.ctypes.c_int.in_dll(library, name).value

patch = pytest.MonkeyPatch()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in.build(tmp_path_factory.mktemp("stand_in"))


def python(code: str, *arguments: object, directory: Path, preamble: str = PREAMBLE) -> str:
    """What a new process prints; `directory` is its cache."""
    package, tests = Path(jax_fastattn.__file__).parents[1], Path(__file__).parents[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(package), str(tests), os.environ.get("PYTHONPATH", "")]),
        "JAX_FASTATTN_CACHE_DIR": str(directory),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-P", "-c", preamble + textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_import_loads_neither_the_compiler_nor_the_extension(tmp_path: Path) -> None:
    code = """
        import sys
        import jax_fastattn
        loaded = [name for name in sys.modules if name.split(".")[0] in ("cutlass", "cuda", "torch", "flax")]
        print(loaded, "jax_fastattn.ffi._ffi" in sys.modules, "jax_fastattn.compilation.compiler" in sys.modules)
    """
    assert python(code, directory=tmp_path, preamble="") == "[] False False"


@needs_compiler
def test_with_a_warm_cache_no_compiler_is_imported(tmp_path: Path) -> None:
    code = """
        program = jax.jit(stand_in.launch).trace(*stand_in.operands()).lower(lowering_platforms=("cuda",))
        print("cutlass" in sys.modules, ffi.compile_count(), hash_of(program.as_text()))
    """
    preamble = PREAMBLE + "\nimport hashlib\nhash_of = lambda text: hashlib.sha256(text.encode()).hexdigest()\n"
    cold = python(code, directory=tmp_path, preamble=preamble).split()
    warm = python(code, directory=tmp_path, preamble=preamble).split()
    assert cold[:2] == ["True", "1"]
    assert warm[:2] == ["False", "0"]
    assert cold[2] == warm[2], "JAX's compilation cache finds the program of the other process"


def test_export_round_trip(tmp_path: Path, library: Path) -> None:
    """The second process has no kernel, no key and no compiler: the file carries what it needs."""
    save = """
        library = use(sys.argv[1])
        stand_in.stand_in_compiler(patch)
        checks = [jax.export.DisabledSafetyCheck.custom_call(ffi.TARGET_NAME)]
        exported = jax.export.export(jax.jit(stand_in.launch), disabled_checks=checks)(*stand_in.operands())
        Path(sys.argv[2]).write_bytes(exported.serialize())
    """
    run = """
        library = use(sys.argv[1])
        exported = jax.export.deserialize(bytearray(Path(sys.argv[2]).read_bytes()))
        out, lse = jax.block_until_ready(exported.call(*stand_in.operands()))
        print(float(lse[0, 0, 0]), count(library, "seen_loads"), count(library, "seen_runs"), ffi.compile_count())
    """
    python(save, library, tmp_path / "program", directory=tmp_path / "cache")
    assert python(run, library, tmp_path / "program", directory=tmp_path / "other") == "2.0 1 1 0"


def test_compilation_cache_of_jax(tmp_path: Path, library: Path) -> None:
    """A second process takes the executable from JAX's cache, and launches."""
    code = """
        library = use(sys.argv[1])
        jax.config.update("jax_compilation_cache_dir", sys.argv[2])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
        hits = []
        jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("cache_hits")))
        stand_in.stand_in_compiler(patch, name="persistent")
        arrays = stand_in.operands()
        before = sum(hits)
        out, lse = jax.block_until_ready(jax.jit(stand_in.launch)(*arrays))
        print(sum(hits) - before, float(lse[0, 0, 0]), count(library, "seen_loads"))
    """
    arguments = (library, tmp_path / "jax")
    assert python(code, *arguments, directory=tmp_path) == "0 2.0 1"
    assert python(code, *arguments, directory=tmp_path) == "1 2.0 1"


FAILING_LAUNCH = """
stand_in.stand_in_compiler(patch)
{setup}
try:
    jax.block_until_ready(jax.jit(stand_in.launch)(*stand_in.operands()))
except jax.errors.JaxRuntimeError as error:
    print(error)
"""


def _failure(setup: str, directory: Path, *arguments: object) -> str:
    return python("", *arguments, directory=directory, preamble=PREAMBLE + FAILING_LAUNCH.format(setup=setup))


def _paths(runtime: str, driver: str) -> str:
    return (
        "use(sys.argv[1])\nfrom jax_fastattn.ffi import _ffi\n"
        f"_ffi.set_library_paths(runtime={runtime}, driver={driver})\n"
    )


@pytest.mark.parametrize(
    ("runtime", "driver", "message"),
    [
        (
            "''",
            "sys.argv[1]",
            "libcute_dsl_runtime.so, through which CUDA kernels are launched, was not found. Install",
        ),
        (
            "'/no/runtime.so'",
            "sys.argv[1]",
            "the CuTe DSL runtime /no/runtime.so cannot be used: /no/runtime.so: cannot",
        ),
        ("'libm.so.6'", "sys.argv[1]", "libm.so.6 cannot be used: it has no symbol CuteDSLRT_Module_Create_From_Bytes"),
        ("sys.argv[1]", "'libno.so.1'", "the CUDA driver libno.so.1 cannot be used: libno.so.1: cannot open"),
        ("sys.argv[1]", "'libm.so.6'", "the CUDA driver libm.so.6 cannot be used: it has no symbol cuCtxGetDevice"),
    ],
    ids=["runtime not found", "runtime gone", "wrong runtime", "no driver", "wrong driver"],
)
def test_missing_library(tmp_path: Path, library: Path, runtime: str, driver: str, message: str) -> None:
    assert message in _failure(_paths(runtime, driver), tmp_path, library)


@needs_compiler
def test_the_real_runtime_refuses_without_crashing(tmp_path: Path, library: Path) -> None:
    """A section table past the end of the object, and an object without our function."""
    real = _paths("libraries.runtime_library()", "sys.argv[1]")
    given = real + "stand_in.stand_in_compiler(patch, Path(sys.argv[2]).read_bytes())\n"
    damaged, foreign = tmp_path / "damaged.o", tmp_path / "foreign.o"
    damaged.write_bytes(stand_in.elf_object(section_table=1 << 20))
    foreign.write_bytes(stand_in.elf_object())
    assert "could not load kernel" in _failure(given, tmp_path / "cache 1", library, damaged)
    assert "has no function jax_fastattn" in _failure(given, tmp_path / "cache 2", library, foreign)
