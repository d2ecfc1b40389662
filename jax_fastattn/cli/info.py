# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`info`: prints what this machine has, what serves its GPUs, and what is missing.

Every fact comes from where calls get it (`ffi`, `kernels.support`, `ops.dispatch`). Nothing is imported that a machine
may lack: no compiler, no extension, no GPU is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
from pathlib import Path
from typing import Any

import jax

from jax_fastattn import ffi
from jax_fastattn.cases.models import MODELS
from jax_fastattn.cli import machine, shapes
from jax_fastattn.cli.errors import UsageError
from jax_fastattn.cli.text import columns, file_size
from jax_fastattn.compilation import cache, failures, libraries, settings, workers
from jax_fastattn.ffi import registry
from jax_fastattn.kernels.architectures import ARCHITECTURES
from jax_fastattn.kernels.support import describe_kernels
from jax_fastattn.ops import dispatch

_PACKAGES = (
    "jax_fastattn",
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "nvidia-cutlass-dsl",
)
_ABSENT = {"jax_fastattn": "imported from a source tree"}
# A call without `--length` has this size.
_SIZE = shapes.Size(1, 4096, 4096)


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "info",
        help="what this machine has, what is missing, and why a call falls back",
        description="Prints versions, GPUs, compiler, cache and what is missing. With the options of a call it also "
        "prints which kernels that call would run here, or why it takes the XLA path.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    shapes.add_shape(parser)
    shapes.add_size(parser, "default: 1", "default: 4096")
    shapes.add_arch(parser, "explain the call for this GPU, such as sm_90a, instead of the local ones")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Prints what is found."""
    calls = _calls(options)
    found = collect()
    if calls:
        found["calls"] = [_explained(case, arch) for case in calls for arch in options.arch or [None]]
    print(json.dumps(found, indent=1) if options.json else _page(found))
    return 0


def _calls(options: argparse.Namespace) -> list[Any]:
    """Returns the calls to explain; none if no option describes one."""
    if shapes.describes_call(options):
        size = shapes.Size(options.batch or 1, *options.length) if options.length else _SIZE
        size = dataclasses.replace(size, batch=options.batch or 1)
        return [shapes.sized(layer, options, size) for layer in shapes.layers(options).values()]
    if options.arch:
        raise UsageError("--arch explains a call; describe it by --heads and --head-dim, or by --model")
    return []


def _explained(case: Any, arch: str | None) -> dict[str, Any]:
    """Returns what a call would run."""
    with ffi.target_arch(arch):
        try:
            found = dispatch.explain(case.problem())
        except RuntimeError as error:  # GPUs of different architectures
            found = dispatch.Explanation("error", None, None, None, (str(error),), str(error))
    return {"call": shapes.describe(case), "arch": arch, "explanation": str(found), **dataclasses.asdict(found)}


def collect() -> dict[str, Any]:
    """Returns everything that `info` prints, in types that JSON has."""
    devices, why_none = machine.local_gpus()
    state, extension_problem = cache.state(), _extension_problem()
    return {
        "versions": {"python": platform.python_version(), **{name: machine.version(name) for name in _PACKAGES}},
        "backend": _backend(),
        "gpus": [_gpu(device) for device in devices],
        "driver_cuda": libraries.driver_version(),
        "extension": not extension_problem,
        "compiler": {
            "version": machine.version("nvidia-cutlass-dsl"),
            "cuda_libraries": sorted(libraries.runtime_libraries()),
            "cuda": libraries.toolkit(),
            "runtime": libraries.runtime_library(),
        },
        "cache": {**dataclasses.asdict(state), "path": None if state.path is None else str(state.path)},
        "workers": {"most": workers.most(), "off": not settings.has_workers(), "failure": failures.noted()},
        "families": {arch: _families(arch) for arch in ARCHITECTURES},
        "missing": list(dict.fromkeys(filter(None, [extension_problem, *_missing(devices, why_none, state)]))),
    }


def _extension_problem() -> str:
    """Returns why the C++ extension is missing or does not load; empty if it loads."""
    try:
        ffi.register()
    except ImportError as error:
        if str(error) in ffi.missing_parts():
            return str(error)
        return f"the C++ extension does not load ({error}); reinstall jax_fastattn for this Python"
    return ""


def _backend() -> str:
    try:
        return jax.default_backend()
    except Exception as error:
        return f"none ({str(error).partition(chr(10))[0]})"


def _gpu(device: Any) -> dict[str, Any]:
    """Returns the facts about a device of JAX."""
    capability = str(device.compute_capability)
    arch = machine.architecture(device)
    return {
        "name": device.device_kind,
        "compute_capability": capability,
        "arch": arch,
        "multiprocessors": getattr(device, "core_count", None),
        "kernels": _families(arch) if arch else None,
    }


def _families(arch: str) -> str:
    """Returns which families serve a GPU."""
    return describe_kernels(MODELS["llama3-8b"][0].problem(), arch)[0]


def _missing(devices: list[Any], why_none: str, state: cache.State) -> list[str]:
    """Returns what keeps calls from the kernels, or kernels from the cache, each with its remedy."""
    found = machine.missing_parts()
    found += [_without_gpu(why_none)] if not devices else []
    if devices and _backend() not in ("gpu", "cuda"):
        found.append(f"JAX runs on {_backend()} by default although there is a GPU; unset JAX_PLATFORMS")
    for device in devices:
        arch, known = machine.architecture(device), ", ".join(registry.BY_CAPABILITY)
        if arch is None:
            found.append(
                f"no kernel runs on compute capability {device.compute_capability} ({device.device_kind}), so calls "
                f"take the XLA path there; the kernels run on {known}"
            )
        found += ffi.compiler_reasons(arch)
    found += _old_driver()
    if state.problem:
        where = "no cache directory" if state.path is None else f"cache directory {state.path}"
        found.append(f"{where}: {state.problem}. {state.remedy}")
    return found


def _without_gpu(why_none: str) -> str:
    """Says why JAX has no CUDA device."""
    driver = libraries.driver_version()
    has_plugin = any(machine.version(f"jax-cuda{cuda}-plugin") for cuda in (12, 13))
    if driver is None:
        is_loud = has_plugin and not os.environ.get("JAX_PLATFORMS")
        quiet = ". JAX's CUDA plugin prints a traceback about it; JAX_PLATFORMS=cpu avoids that" if is_loud else ""
        return (
            "no NVIDIA driver (libcuda.so.1) is found, so calls take the XLA path; on a machine with a GPU install the "
            f"driver, or start the container with its GPUs (docker run --gpus all). `warmup --arch` needs no GPU{quiet}"
        )
    if not has_plugin:
        return f"JAX has no CUDA plugin; run `pip install 'jax[cuda{12 if driver < 13 else 13}]'`"
    hidden = {name: os.environ[name] for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES") if name in os.environ}
    where = f"; the environment has {', '.join(f'{name}={x}' for name, x in hidden.items())}" if hidden else ""
    return f"JAX finds no CUDA device: {why_none}{where}. See `nvidia-smi`, then the installation guide of JAX"


def _old_driver() -> list[str]:
    """Says that no installed compiler library runs with this driver."""
    installed, driver = sorted(libraries.runtime_libraries()), libraries.driver_version()
    if not installed or libraries.toolkit() is not None:
        return []
    return [
        f"nvidia-cutlass-dsl has libraries for CUDA {installed[0]} and the driver runs CUDA {driver}; update the "
        "driver, or run `pip install 'nvidia-cutlass-dsl>=4.8'` for CUDA 12"
    ]


def _page(found: dict[str, Any]) -> str:
    """Returns everything as text."""
    compiler, state = found["compiler"], found["cache"]
    versions = [(name, version or _ABSENT.get(name, "not installed")) for name, version in found["versions"].items()]
    rows = [*versions, ("backend of JAX", found["backend"])]
    rows += [(f"GPU {i}", _gpu_line(gpu)) for i, gpu in enumerate(found["gpus"])] or [("GPU", "none")]
    rows += [
        ("driver", f"runs CUDA {found['driver_cuda']}" if found["driver_cuda"] else "none"),
        ("C++ extension", "there" if found["extension"] else "missing"),
        ("compiler", _compiler_line(compiler)),
        ("runtime", _relative(compiler["runtime"])),
        ("cache", _cache_line(state)),
        ("workers", _workers_line(found["workers"])),
    ]
    rows += [(f"served by {families}", ", ".join(archs)) for families, archs in _by_family(found).items()]
    parts = [columns(rows), _list("missing", found["missing"]) if found["missing"] else "missing: nothing"]
    parts += [f"{call['call']}{_on(call['arch'])}:\n  {call['explanation']}" for call in found.get("calls", [])]
    return "\n\n".join(parts)


def _gpu_line(gpu: dict[str, Any]) -> str:
    served = f"{gpu['arch']}: {gpu['kernels']}" if gpu["kernels"] else "no kernels, XLA path"
    return f"{gpu['name']}, compute capability {gpu['compute_capability']}, {served}"


def _compiler_line(compiler: dict[str, Any]) -> str:
    if not compiler["version"]:
        return "not installed"
    installed = " and ".join(map(str, compiler["cuda_libraries"])) or "none"
    return f"nvidia-cutlass-dsl {compiler['version']} for CUDA {compiler['cuda']} (libraries for CUDA: {installed})"


def _relative(runtime: str | None) -> str:
    """Returns a path from the name of its package on."""
    if runtime is None:
        return "none"
    parts = Path(runtime).parts
    return str(Path(*parts[parts.index("nvidia_cutlass_dsl") :])) if "nvidia_cutlass_dsl" in parts else runtime


def _cache_line(state: dict[str, Any]) -> str:
    if state["path"] is None:
        return "none"
    if state["problem"] and not state["entries"]:
        return f"{state['path']}, not usable"
    if not state["exists"]:
        return f"{state['path']}, does not exist yet"
    access = "readable and writable" if state["is_writable"] else "readable, not writable by this user"
    return f"{state['path']}, {state['entries']} kernels, {file_size(state['size'])}, {access}"


def _workers_line(found: dict[str, Any]) -> str:
    if found["off"]:
        return "off, by JAX_FASTATTN_WORKERS"
    failure = f"; the last one failed: {found['failure']}" if found["failure"] else ""
    return f"up to {max(found['most'], 0)} compile kernels in the background{failure}"


def _by_family(found: dict[str, Any]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for arch, families in found["families"].items():
        grouped.setdefault(families, []).append(arch)
    return grouped


def _on(arch: str | None) -> str:
    return "" if arch is None else f", on {arch}"


def _list(title: str, items: list[str]) -> str:
    return "\n".join([f"{title}:", *(f"  - {item}" for item in items)])
