# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m jax_fastattn`: what each command prints, what it refuses, and that warm kernels are those of calls."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import calls
import jax
import kept
import pytest
from test_import import COMPILER, WITHOUT

import jax_fastattn
from jax_fastattn import target_arch
from jax_fastattn.cases.case import Case
from jax_fastattn.cases.kernels import kernel_specs
from jax_fastattn.cases.models import MODELS
from jax_fastattn.cli import bench, info, machine, shapes, warmup
from jax_fastattn.cli.main import build_parser, main
from jax_fastattn.compilation import cache, failures, libraries, workers
from jax_fastattn.ffi import call
from jax_fastattn.kernels.architectures import ARCHITECTURES
from jax_fastattn.kernels.arguments.precision import PRECISIONS, PRODUCTS_IN_WORDS, forbids_tf32
from jax_fastattn.kernels.choose import prepass_configs
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.support import unsupported_reasons
from jax_fastattn.spec import QKV

ROOT = Path(__file__).parents[1]
KEY = "ab" * 32
SHAPE = ["--heads", "4/2", "--head-dim", "20", "--causal"]
FLOAT32 = ["--heads", "8", "--head-dim", "64", "--dtype", "float32"]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("JAX_FASTATTN_CACHE_DIR", str(path))
    return path


def started(*command: str) -> subprocess.CompletedProcess[str]:
    """A process that sees no GPU."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"PYTHONWARNINGS": ",".join(kept.STRICT)}
    # The package that this process has, which may be installed: the source tree need not have the extension.
    paths = [str(Path(jax_fastattn.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, "-P", *command], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def printed(*arguments: str, status: int = 0) -> str:
    """What a command prints in a process of its own."""
    done = started("-m", "jax_fastattn", *arguments)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def options_of(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(arguments)


def warm_specs(arch: str, *arguments: str) -> set[KernelSpec]:
    """What `warmup` compiles."""
    options = options_of("warmup", *arguments)
    found = [case for layer in shapes.layers(options).values() for case in warmup.cases_of(layer, options)]
    return set(kernel_specs(found, arch))


@pytest.mark.slow
def test_a_later_call_finds_the_kernels_that_warmup_compiled(directory: Path) -> None:
    """By real compilers in two processes. Calls pad a head dim of 20."""
    text = printed("warmup", *SHAPE, "--arch", "sm_80", "--processes", "2")
    line = r"^\[\d+/10\] sm_80, (?:forward|decode|backward), d24, .*: compiled in \d"
    assert len(re.findall(line, text, re.MULTILINE)) == 10
    assert re.search(rf"^10 kernels, by nvidia-cutlass-dsl .* for CUDA {libraries.toolkit()}, into", text)
    assert "10 compiled, 0 in the cache before, 0 failed" in text
    code = """
        import jax, jax.numpy as jnp
        import jax_fastattn
        k = jnp.ones((2, 300, 2, 20), jnp.bfloat16)
        loss = lambda *x: jax_fastattn.attention(*x, is_causal=True, implementation="cuda").astype(jnp.float32).sum()
        with jax_fastattn.target_arch("sm_80"):
            for length in (64, 1):
                q = jnp.ones((2, length, 4, 20), jnp.bfloat16)
                jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k).lower(lowering_platforms=("cuda",))
        print(jax_fastattn.ffi.compile_count())
    """
    done = started("-c", "\n".join(line[8:] for line in code.splitlines()))
    assert done.stdout == "0\n", done.stderr
    assert "0 compiled, 10 in the cache before" in printed("warmup", *SHAPE, "--arch", "sm_80")


CALLS = [
    *(["--model", name] for name in MODELS),
    SHAPE,
    [*SHAPE, "--deterministic", "--with", "sinks", "return_residual"],
    [*SHAPE, "--precise-gradients"],
    [*SHAPE, "--packed"],
    [*SHAPE, "--packed", "--precise-gradients"],
    ["--heads", "6", "--head-dim", "44/64", "--packed", "--with", "query_offset", "--window", "9/none"],
    ["--heads", "6", "--head-dim", "128", "--soft-cap", "5", "--with", "query_seq_lengths", "key_value_seq_lengths"],
    ["--heads", "6/1", "--head-dim", "64", "--dtype", "float16", "--window", "none/0", "--with", "query_offset"],
    ["--heads", "6/2", "--head-dim", "64", "--bias", "bnts"],
    ["--heads", "6/2", "--head-dim", "64/100"],
    ["--heads", "6/2", "--head-dim", "64", "--bias", "nts/float32", "--with", "mask"],
    ["--heads", "6/2", "--head-dim", "192/128", "--causal", "--with", "segment_ids"],
    ["--heads", "12", "--head-dim", "64", "--bias", "ts"],
    ["--heads", "6", "--head-dim", "128", "--bias", "bs", "--causal"],
]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("arguments", CALLS, ids=" ".join)
def test_keys_are_those_of_a_call(
    arguments: list[str], arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call and its gradients, lowered as `bench` makes them; a stand-in takes the compiler's place."""
    calls.lower_for_cuda(monkeypatch, tmp_path)
    asked: list[KernelSpec] = []
    compile_kernel = call._compile
    monkeypatch.setattr(call, "_compile", lambda spec: asked.append(spec) or compile_kernel(spec))
    options = options_of("warmup", *arguments)
    for layer in shapes.layers(options).values():
        case = shapes.sized(layer, options, shapes.Size(2, 64, 64))
        operands = case.operands(jax.random.key(0))

        def gradients(operands: Any, case: Case = case) -> Any:
            names = (*QKV, "sinks") if case.constant_bias else (*QKV, "sinks", "bias")
            wanted = {name: getattr(operands, name) for name in names}
            wanted = {name: x for name, x in wanted.items() if x is not None}
            out, pullback = jax.vjp(lambda wanted: bench._ours(case, operands._replace(**wanted)), wanted)
            return pullback(out)

        with target_arch(arch):
            jax.jit(gradients).trace(operands).lower(lowering_platforms=("cuda",))
    assert {spec.op for spec in asked} - {"prepass"} == {"forward", "backward"}
    assert set(asked) <= warm_specs(arch, *arguments)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
@pytest.mark.parametrize("arguments", CALLS, ids=" ".join)
def test_without_a_length_every_size_is_warm(arguments: list[str], arch: str) -> None:
    options = options_of("warmup", *arguments)
    lengths = (1, 128, 512, 513, 1024, 1025, 2048, 2049, 16384)
    sizes = [*itertools.product((1, 7, 300), (*lengths, 2, 5, 20, 40), lengths)]
    found = {
        spec
        for layer in shapes.layers(options).values()
        for size in sizes[:: 5 if options.packed else 7 if options.operands else 1]
        for spec in _specs_of_size(layer, options, shapes.Size(*size), arch)
    }
    assert found <= warm_specs(arch, *arguments)


def _specs_of_size(layer: Case, options: argparse.Namespace, size: shapes.Size, arch: str) -> list[KernelSpec]:
    options = argparse.Namespace(
        **vars(options) | {"batch": size.batch, "length": (size.query_length, size.key_length)}
    )
    return kernel_specs(warmup.cases_of(layer, options), arch)


def test_a_mask_has_a_prepass_for_each_size_of_tiles() -> None:
    specs = warm_specs("sm_90a", "--heads", "32/8", "--head-dim", "192/128", "--with", "mask", "--length", "8192")
    read = {config for spec in specs for config in prepass_configs(spec)}
    assert {spec.config for spec in specs if spec.op == "prepass"} == read and len(read) == 3


def test_a_mask_of_padding_is_warm() -> None:
    arguments = ["--heads", "6/2", "--head-dim", "64", "--with", "mask"]
    options = options_of("warmup", *arguments)
    (layer,) = shapes.layers(options).values()
    case = dataclasses.replace(shapes.sized(layer, options, shapes.Size(2, 512, 512)), mask="bs")
    found = kernel_specs([case], "sm_90a")
    assert any(spec.alike for spec in found) and {*found} <= warm_specs("sm_90a", *arguments)


def test_a_length_chooses_among_the_kernels() -> None:
    arguments = ["--heads", "32/8", "--head-dim", "128", "--causal"]
    short, long = (warm_specs("sm_90a", *arguments, "--length", length) for length in ("512", "8192"))
    assert len(short) == len(long) == 2
    assert short != long
    assert short | long <= warm_specs("sm_90a", *arguments)


@pytest.mark.parametrize(
    ("page", "text", "arguments"),
    [
        ("cli", r"compiles (\d+) kernels", ["--model", "llama3-8b", "--arch", "sm_80", "--arch", "sm_90a"]),
        (
            "first_step",
            r"are (\d+) kernels",
            ["--model", "llama3-8b", "--model", "gemma2-9b", "--arch", "sm_90a"],
        ),
    ],
    ids=["cli", "first_step"],
)
def test_pages_have_the_number_of_kernels(page: str, text: str, arguments: list[str]) -> None:
    options = options_of("warmup", *arguments)
    found = re.search(text, (Path(__file__).parents[1] / "docs" / f"{page}.md").read_text())
    assert found is not None and int(found[1]) == sum(len(warm_specs(arch, *arguments)) for arch in options.arch)


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [
        (["--dtype", "float16", "--bias", "bnts"], "float16"),
        (["--bias", "nts"], "bfloat16"),
        (["--dtype", "float16", "--bias", "nts/float32"], "float32"),
    ],
    ids=["float16", "bfloat16", "float32"],
)
def test_a_warm_bias_has_the_dtype_of_the_query_unless_another_is_named(arguments: list[str], dtype: str) -> None:
    """`bench` and `warmup` take it from one place, so a comparison of the two does not show a wrong one."""
    specs = warm_specs("sm_80", "--heads", "6/2", "--head-dim", "64", "--length", "64", *arguments)
    assert specs and {spec.bias_dtype for spec in specs} == {dtype}


def test_one_query_is_not_several() -> None:
    options = options_of("info", *SHAPE)
    (layer,) = shapes.layers(options).values()
    assert ", 1 query, 300 keys, " in shapes.describe(shapes.sized(layer, options, shapes.Size(2, 1, 300)))


@pytest.mark.parametrize("setting", ["default", "tensorfloat32"])
def test_float32_has_the_products_of_the_setting(setting: str) -> None:
    """Without a length too, where calls of few queries have no kernel."""
    with jax.default_matmul_precision(setting):
        found = {spec for length in ([], ["--length", "4096"]) for spec in warm_specs("sm_90a", *FLOAT32, *length)}
    assert {spec.products for spec in found if spec.op != "prepass"} == {PRECISIONS[setting]}


def test_commands_follow_the_precision_that_is_set(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info_of_call = ["info", *FLOAT32, "--arch", "sm_90a"]
    assert main(info_of_call) == 0
    kind = f'{PRODUCTS_IN_WORDS["bf16x3"]}, since `jax.default_matmul_precision` is "default")'
    assert kind in capsys.readouterr().out
    with jax.default_matmul_precision("tensorfloat32"):
        assert main(info_of_call) == 0
    kind = f'{PRODUCTS_IN_WORDS["half"]}, since `jax.default_matmul_precision` is "tensorfloat32")'
    assert kind in capsys.readouterr().out
    text = 'XLA path, because the precision of float32 products is "highest", since '
    with jax.default_matmul_precision("highest"):
        assert main(info_of_call) == 0
        assert text + '`jax.default_matmul_precision` is "highest"; ' in capsys.readouterr().out
        with pytest.raises(SystemExit):
            main(["warmup", *FLOAT32, "--arch", "sm_90a"])
        assert "such calls run no kernel on sm_90a: the precision" in capsys.readouterr().err
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    forbids_tf32.cache_clear()
    try:
        assert main(info_of_call) == 0
    finally:
        forbids_tf32.cache_clear()
    assert text + "NVIDIA_TF32_OVERRIDE is 0 in the environment; " in capsys.readouterr().out


def test_kernels_run_the_named_models_everywhere() -> None:
    cases = [case for layers in MODELS.values() for case in layers]
    assert [unsupported_reasons(case.problem(), arch) for case in cases for arch in ARCHITECTURES if case] == [
        [] for _ in range(len(cases) * len(ARCHITECTURES))
    ]
    assert {name: len(layers) for name, layers in MODELS.items() if len(layers) > 1} == {
        "gemma2-9b": 2,
        "gemma3-12b": 2,
        "gemma3-27b": 2,
        "gpt-oss-20b": 2,
    }


def test_a_kernel_that_fails_stops_no_other(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = iter(["compiled in 1.0 s", "failed: out of luck"])
    monkeypatch.setattr(warmup, "_prepared", lambda specs, *more: [(spec, next(outcomes)) for spec in specs[:2]])
    assert main(["warmup", *SHAPE, "--arch", "sm_80"]) == 1
    printed = capsys.readouterr()
    assert "1 compiled, 8 in the cache before, 1 failed" in printed.out
    assert "out of luck" not in printed.out and printed.err.endswith(": failed: out of luck\n")


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"problem": "ValueError: no"}, "failed: ValueError: no"),
        ({"problem": "it could not be written to the cache"}, "failed: it could not be written to the cache"),
        ({"seconds": 1.26}, "compiled in 1.3 s"),
    ],
)
def test_what_became_of_a_kernel(found: dict[str, Any], text: str) -> None:
    assert warmup.outcome(found) == text


def test_a_process_that_ends_early_fails_its_kernel_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its place is taken by another one, which ends as well here."""
    monkeypatch.setattr(workers, "command", lambda niceness: ["sh", "-c", "kill -9 $$"])
    assert main(["warmup", *SHAPE, "--arch", "sm_80", "--length", "64", "--processes", "1"]) == 1
    printed = capsys.readouterr()
    assert "0 compiled, 0 in the cache before, 2 failed" in printed.out
    ended = (
        "failed: its process ended by SIGKILL, perhaps out of memory; if memory is short, pass a smaller --processes"
    )
    assert printed.err.count(ended) == 2


def test_warmup_compiles_nothing_that_it_cannot_keep(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory.mkdir()
    directory.chmod(0o777)
    assert main(["warmup", *SHAPE, "--arch", "sm_80"]) == 1
    assert f"cannot keep kernels in {directory}: it will not be used, since it can be" in capsys.readouterr().err


def test_a_user_who_only_reads_the_cache_learns_whether_it_has_everything(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root may write everywhere, so the test says that this user may not."""
    specs = [*warm_specs("sm_80", *SHAPE)]
    for spec in specs[1:]:
        cache.store(cache.kernel_key(spec), b"kernel")
    find_state = cache.state
    monkeypatch.setattr(cache, "state", lambda: dataclasses.replace(find_state(), is_writable=False))
    assert main(["warmup", *SHAPE, "--arch", "sm_80"]) == 1
    assert f"in {directory}: it lacks 1 of 10, and this user cannot write to it. Run" in capsys.readouterr().err
    cache.store(cache.kernel_key(specs[0]), b"kernel")
    assert main(["warmup", *SHAPE, "--arch", "sm_80"]) == 0
    assert "0 compiled, 10 in the cache before, 0 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("user", "compiled", "text"),
    [
        (0, 2, "To let other users of this machine or image read them: chmod -R a+rX"),
        (1000, 2, "No other user can use what this user compiled"),
        (1000, 0, "Processes find these kernels"),
    ],
)
def test_warmup_says_who_can_use_its_kernels(
    user: int,
    compiled: int,
    text: str,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    warmup._print_end(2, compiled, 0)
    assert capsys.readouterr().out.splitlines()[-1].startswith(text)


def test_info_in_a_process_of_its_own(directory: Path) -> None:
    cache.store(KEY, b"kernel")
    found = json.loads(printed("info", "--json"))
    assert found["versions"]["jax"] == jax.__version__
    assert (found["backend"], found["gpus"], found["extension"]) == ("cpu", [], True)
    assert found["compiler"]["cuda"] == libraries.toolkit()
    assert (found["cache"]["path"], found["cache"]["entries"]) == (str(directory), 1)
    assert found["families"]["sm_90a"] == "sm90 forward, sm90 backward"
    assert "calls" not in found
    assert (found["workers"]["off"], found["workers"]["failure"]) == (True, "")


def test_info_says_how_many_workers_there_are_and_what_failed(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing else does. A worker that succeeds, or `cache clear`, deletes the note."""
    monkeypatch.setattr(workers, "most", lambda: 3)
    assert main(["info"]) == 0
    assert re.search(r"^workers +off, by JAX_FASTATTN_WORKERS$", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.setenv("JAX_FASTATTN_WORKERS", "1")
    failures.note("its process ended by SIGKILL")
    assert main(["info"]) == 0
    line = r"^workers +up to 3 compile kernels in the background; the last one failed: its process ended by SIGKILL$"
    assert re.search(line, capsys.readouterr().out, re.MULTILINE)
    assert main(["cache", "clear"]) == 0
    assert failures.noted() == ""


def test_info_without_compiler_and_extension(directory: Path) -> None:
    code = WITHOUT.format(names=(*COMPILER, "jax_fastattn.ffi._ffi"))
    done = started("-c", f"{code}from jax_fastattn.cli.main import main\nsys.exit(main(['info']))")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^C\+\+ extension +missing$", done.stdout, re.MULTILINE)
    assert done.stdout.count("  - the C++ extension of jax_fastattn") == 1
    assert "  - nvidia-cutlass-dsl, which compiles and loads kernels, is not installed; run" in done.stdout


def test_info_says_why_a_call_falls_back(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--heads", "32/8", "--head-dim", "128"]
    assert main(["info", *shape, "--dtype", "float32", "--bias", "bnts"]) == 0
    text = capsys.readouterr().out
    assert "heads 32/8, head dim 128, float32, bias:\n  XLA path, because the platform is cpu\n" in text
    assert main(["info", "--json", *shape, "--causal", "--arch", "sm_90a", "--arch", "sm_80"]) == 0
    found = json.loads(capsys.readouterr().out)["calls"]
    assert [x["kernel"] for x in found] == ["sm90 forward, sm90 backward", "sm80 forward, sm80 backward"]


def test_info_names_the_kernels_of_each_gpu(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {"NVIDIA H100": "9.0", "NVIDIA A100": "8.0", "Tesla T4": "7.5"}
    devices = [types.SimpleNamespace(device_kind=name, compute_capability=x) for name, x in kinds.items()]
    monkeypatch.setattr(machine, "local_gpus", lambda: (devices, ""))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"GPU 0 +NVIDIA H100, compute capability 9\.0, sm_90a: sm90 forward, sm90 backward\n", text)
    assert re.search(r"GPU 1 +NVIDIA A100, compute capability 8\.0, sm_80: sm80 forward, sm80 backward\n", text)
    assert re.search(r"GPU 2 +Tesla T4, compute capability 7\.5, no kernels, XLA path\n", text)
    assert "missing:\n  - no kernel runs on compute capability 7.5 (Tesla T4)" in text


@pytest.mark.parametrize(
    ("driver", "plugin", "text"),
    [
        (None, None, "no NVIDIA driver"),
        (12, None, "pip install 'jax[cuda12]'"),
        (13, None, "pip install 'jax[cuda13]'"),
        (13, "0.12", "JAX finds no CUDA device: Unknown backend"),
    ],
)
def test_info_says_why_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, driver: int | None, plugin: str | None, text: str
) -> None:
    monkeypatch.setattr(libraries, "driver_version", lambda: driver)
    monkeypatch.setattr(machine, "version", lambda package: plugin)
    assert text in info._without_gpu("Unknown backend")


@pytest.mark.parametrize(
    ("plugin", "platforms", "is_loud"), [("0.12", "", True), ("0.12", "cpu", False), (None, "", False)]
)
def test_info_explains_the_traceback_of_jax(
    monkeypatch: pytest.MonkeyPatch, plugin: str | None, platforms: str, is_loud: bool
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(libraries, "driver_version", lambda: None)
    monkeypatch.setattr(machine, "version", lambda package: plugin)
    text = "JAX's CUDA plugin prints a traceback about it; JAX_PLATFORMS=cpu avoids that"
    assert (text in info._without_gpu("Unknown backend")) == is_loud


def test_a_compiler_that_is_there_in_part(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "version", lambda package: None)
    assert main(["info"]) == 0
    assert "  - nvidia-cutlass-dsl is installed in part" in capsys.readouterr().out
    assert main(["warmup", *SHAPE, "--arch", "sm_80"]) == 1
    assert "nvidia-cutlass-dsl is installed in part" in capsys.readouterr().err


def test_info_on_a_cache_that_is_not_used(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory.mkdir()
    directory.chmod(0o777)
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"{directory}, not usable" in text
    assert f"  - cache directory {directory}: it will not be used, since it can be written by its group or by" in text
    assert "Delete that directory, or set `JAX_FASTATTN_CACHE_DIR`" in text
    assert "Root must fill a directory that several users share." in text


def test_info_without_a_cache_directory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cache, "directory", lambda: None)
    assert main(["info"]) == 0
    assert "  - no cache directory: the user's home directory is unknown. Set" in capsys.readouterr().out


def test_cache_clear_deletes_kernels_alone(directory: Path) -> None:
    assert "deleted 0 compiled kernels" in printed("cache", "clear")
    cache.store(KEY, b"kernel")
    (directory / "notes").write_text("mine")
    assert f"deleted 1 compiled kernel (38 bytes) from {directory}" in printed("cache", "clear")
    assert [path.name for path in directory.iterdir()] == ["notes"]


def test_cache_clear_of_a_directory_that_others_write(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.store(KEY, b"kernel")
    directory.chmod(0o777)
    assert main(["cache", "clear"]) == 1
    assert "nothing was deleted. Delete that directory, or set" in capsys.readouterr().err
    assert (directory / KEY).exists()


def test_bench_on_the_cpu(directory: Path) -> None:
    shape = ["--heads", "4/2", "--head-dim", "16", "--length", "32", "--seconds", "0.01"]
    text = printed("bench", *shape, "--causal")
    assert "No GPU: these are times of XLA paths on the CPU" in text
    row = r"^{} +(\d+\.\d{{3}} ms +){{2}}\d+\.\d\dx +\d+\.\d\dx$"
    for name in ("jax_fastattn", "jax.nn xla"):
        assert re.search(row.format(name), text, re.MULTILINE), text
    assert "jax_fastattn: XLA path, because the platform is cpu\njax.nn cudnn: needs an NVIDIA GPU" in text


@pytest.mark.parametrize("more", [["--packed", "--with", "sinks", "query_offset"], ["--with", *shapes.WITH]], ids=str)
def test_bench_says_what_jax_nn_lacks(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--heads", "4/2", "--head-dim", "16", "--length", "32", "--seconds", "0.01", "--batch", "2"]
    assert main(["bench", *shape, *more]) == 0
    assert "jax.nn xla: has no argument for " in capsys.readouterr().out


def test_bench_prints_its_error_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table keeps the times of peers."""

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("out of luck")

    monkeypatch.setattr(bench, "attention", fail)
    assert main(["bench", "--heads", "4/2", "--head-dim", "8", "--length", "32", "--seconds", "0.01"]) == 1
    printed = capsys.readouterr()
    assert "out of luck" not in printed.out and "jax.nn xla  " in printed.out
    assert printed.err == "python -m jax_fastattn bench: call: ValueError: out of luck\n"


def test_bench_leaves_out_what_the_memory_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_is_too_large", lambda size: size > 10**5)
    shape = ["--heads", "4/2", "--head-dim", "8", "--length", "256", "--seconds", "0.01"]
    assert main(["bench", *shape]) == 0
    assert "jax.nn xla: not run: it holds 1.0 MB of logits" in capsys.readouterr().out
    assert main(["bench", *shape, "--batch", "2000"]) == 1
    assert "the arrays of this call take" in capsys.readouterr().err


def test_an_interrupt_is_a_status_without_a_traceback(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "clear", interrupted)
    assert main(["cache", "clear"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


WRONG = {
    "": "the following arguments are required: {info,warmup,cache,bench}",
    "frobnicate": "invalid choice: 'frobnicate'",
    "cache": "the following arguments are required: {clear}",
    "info --heads 4": "pass --heads and --head-dim",
    "info --arch sm_80": "--arch explains a call; describe it",
    "info --heads 4/3 --head-dim 8": "`4/3` has 3 key/value heads, which do not divide the 4 query heads",
    "info --heads 4/0 --head-dim 8": "`4/0` is not a number of heads",
    "info --heads ٤ --head-dim 8": "is not a number of heads",
    "info --heads 4 --head-dim -8": "`-8` is not a head dim",
    "info --heads 4 --head-dim 8 --window 3": "`3` is not a window LEFT/RIGHT",
    "info --heads 4 --head-dim 8 --soft-cap nan": "`nan` is not a positive number",
    "info --heads 4 --head-dim 8 --soft-cap 1e-50": "`1e-50` is not a positive number that float32 holds",
    "warmup --heads 4 --head-dim 8 --soft-cap 1e300": "`1e300` is not a positive number that float32 holds",
    "bench --heads 4 --head-dim 8 --length 8 --soft-cap 1e300": "`1e300` is not a positive number that float32 holds",
    "info --heads 4 --head-dim 8 --batch 99999999": "is over 65536",
    "info --heads 4 --head-dim 8 --with masks": "invalid choice: 'masks'",
    "info --heads 4 --head-dim 8 --bias tn": "`tn` is not axes of bnts in this order, such as nts, nor these",
    "info --heads 4 --head-dim 8 --bias ts/int8": "`ts/int8` is not axes of bnts in this order",
    "info --heads 4 --head-dim 8 --packed --bias ts": "attention_varlen, and so --packed, has no bias",
    "info --heads 4 --head-dim 8 --packed --with mask": "attention_varlen, and so --packed, has no mask",
    "warmup --arch sm_80": "pass --heads and --head-dim",
    "warmup --model llama3-8b --arch H100": "`H100` is not an architecture that has kernels; pass one of sm_80 (A100),",
    "warmup --model llama3-9b": "invalid choice: 'llama3-9b'",
    "warmup --model llama3-8b --causal --arch sm_80": "--model sets the whole call; leave out --causal",
    "warmup --model llama3-8b": "this machine has no GPU; name the GPU to compile for, such as --arch sm_90a",
    "warmup --model llama3-8b --batch 3 --arch sm_80": "--batch alone chooses no kernel",
    "warmup --heads 4 --head-dim 264 --with mask --arch sm_80": "no kernel on sm_80: `query` has head dim 264; the",
    "warmup --heads 4 --head-dim 192 --dtype float32 --arch sm_86": "no kernel on sm_86: `query` has head dim 192; the",
    "bench --heads 4 --head-dim 8": "the following arguments are required: --length",
    "bench --heads 4 --head-dim 8 --length 8 --seconds 0": "`0` is not a number of seconds",
}


@pytest.mark.parametrize(("line", "text"), WRONG.items(), ids=[*WRONG])
def test_wrong_input(
    line: str, text: str, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "local_gpus", lambda: ([], "none"))
    with pytest.raises(SystemExit) as stopped:
        main(shlex.split(line))
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


def test_wrong_input_of_a_process() -> None:
    done = started("-m", "jax_fastattn", "warmup", "--arch", "sm_80")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("python -m jax_fastattn warmup: error: pass --heads and --head-dim")


@pytest.mark.parametrize(
    ("page", "commands"),
    [("docs/cli.md", {"info", "warmup", "cache", "bench"}), ("README.md", {"info"})],
)
def test_commands_of_the_pages(page: str, commands: set[str]) -> None:
    """The parser takes every command line of the page."""
    text = (ROOT / page).read_text().replace("\\\n", " ")
    lines = re.findall(r"^\$? ?python -m jax_fastattn (.*?)(?:#.*)?$", text, re.MULTILINE)
    assert {line.split()[0] for line in lines} == commands
    for line in lines:
        options_of(*shlex.split(line))
