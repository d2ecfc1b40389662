# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The package on a machine without nvidia-cutlass-dsl, without the extension and without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax_fastattn

# Makes a module impossible to find and to import.
WITHOUT = "import sys\nfor name in ({names!r}): sys.modules[name] = None\n"
COMPILER = ("cutlass", "nvidia_cutlass_dsl", "cuda")


def python(code: str, without: tuple[str, ...] = ()) -> str:
    """What a new process prints that sees no GPU."""
    environment = os.environ | {
        "PYTHONPATH": str(Path(jax_fastattn.__file__).parents[1]),
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }
    code = WITHOUT.format(names=without) + textwrap.dedent(code)
    command = [sys.executable, "-P", "-W", "error", "-c", code]
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
        from jax_fastattn.testing import cases
        from jax._src import xla_bridge
        print(len(cases.GPU_CASES) > 100, bool(xla_bridge._backends), events)
        jax.eval_shape(jax.jit(lambda: 1))
        print(bool(events))
    """
    assert python(code).splitlines() == ["True False []", "True"]


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


def test_public_names() -> None:
    assert sorted(jax_fastattn.__all__) == sorted(
        ["attention", "attention_varlen", "explain", "register_ffi_targets", "target_arch"]
    )
    assert all(callable(getattr(jax_fastattn, name)) for name in jax_fastattn.__all__)
