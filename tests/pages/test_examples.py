# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The examples, and the benchmark that trains one, run as a user runs them, in processes of their own.

The mesh run has eight CPU devices.
"""

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import kept
import numpy as np
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TINY = "--layers 2 --width 32 --heads 4 --kv-heads 2 --length 48 --batch 4 --steps 25 --eval-every 10 --sample 4"


def run(script: str, *options: str, devices: int = 1, optimized: bool = False) -> str:
    """Runs a script of the repository; gives what it printed. It compiles with few optimizations."""
    # flax 0.12.0 looks up two names while it is imported that jax 0.8.0 deprecates; any other warning is an error.
    warnings = [*kept.STRICT, "ignore:jax.array_ref is deprecated", "ignore:jax.ArrayRef is deprecated"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": ",".join(warnings),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(not optimized),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, str(ROOT / script), *options]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def train(output: Path, *options: str, **how: Any) -> tuple[dict[str, Any], str]:
    """Runs train_gpt.py in its tiny size; gives metrics.json and what it printed."""
    printed = run("examples/train_gpt.py", *TINY.split(), "--output", str(output), *options, **how)
    return json.loads((output / "metrics.json").read_text()), printed


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    output = tmp_path_factory.mktemp("one-device")
    return output, *train(output, optimized=True)  # as a user runs it


def test_train_gpt_learns_and_reports(one_device: tuple[Path, dict[str, Any], str]) -> None:
    output, metrics, printed = one_device
    assert len(metrics["losses"]) == 25
    assert metrics["losses"][-1] < metrics["losses"][0] - 1.5
    assert [step for step, _ in metrics["held_out_losses"]] == [10, 20, 25]
    assert metrics["held_out_losses"][-1][1] < metrics["held_out_losses"][0][1]
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert metrics["implementation"] == "jax_fastattn (xla)"
    assert "--- sample ---\ndef __init__(self, " in printed
    assert re.search(r"[\d,]+ tokens/s with jax_fastattn \(xla\) on 1 x cpu", printed)


@pytest.mark.numbers
@pytest.mark.parametrize(
    "options",
    [
        "--data-parallel 2 --tensor-parallel 2 --remat",
        "--tensor-parallel 4",
        "--data-parallel 2 --tensor-parallel 2 --fsdp",
        "--sequence-parallel 4",
        "--data-parallel 2 --sequence-parallel 2 --tensor-parallel 2 --remat",
        "--implementation jax",
        "--data-parallel 2 --dropout 0.2",
    ],
    ids=["mesh-remat", "heads-past-key-heads", "fsdp", "sequence", "three-axes-remat", "jax.nn", "dropout"],
)
def test_train_gpt_has_the_same_losses(
    one_device: tuple[Path, dict[str, Any], str], tmp_path: Path, options: str
) -> None:
    reference, want, _ = one_device
    if "dropout" in options:
        reference = tmp_path / "one"
        without, (want, _) = want, train(reference, "--quiet", "--dropout", "0.2")
        assert np.abs(np.subtract(want["losses"], without["losses"])).max() > 0.01
    got, _ = train(tmp_path, "--quiet", "--compare", str(reference / "metrics.json"), *options.split(), devices=8)
    sizes = [int(size) for size in re.findall(r"parallel (\d)", options)]
    assert got["device"] == f"{np.prod(sizes, dtype=int)} x cpu"
    is_close = "sequence" in options or "dropout" in options
    # Float32 sums in another order, through 25 steps of Adam.
    np.testing.assert_allclose(got["losses"], want["losses"], rtol=1e-5 if is_close else 2e-3)
    assert any(name.startswith("collective-permute") for name in got["collectives"]) == ("sequence" in options)
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    # Of activations `[batch, length, ...]` none is gathered: not q, k or v.
    gathers = [name for name in got["collectives"] if name.startswith("all-gather")]
    assert not [name for name in gathers if re.search(r"\[[24],(12|24|48),", name)]
    assert bool(gathers) == ("fsdp" in options)


def test_train_gpt_packed(tmp_path: Path) -> None:
    """Whole documents in rows, on one device and on a mesh, and the same documents padded."""
    options = ["--packed", "--length", "256", "--steps", "8", "--layers", "1", "--quiet"]
    metrics, printed = train(tmp_path / "one", *options)
    assert len(metrics["losses"]) == 8
    assert metrics["losses"][-1] < metrics["losses"][0] - 0.5
    assert min(metrics["tokens_per_second"], metrics["padded_tokens_per_second"]) > 0
    assert re.search(r"on 1 x cpu; [\d,]+ tokens/s with the same documents padded to the longest", printed)
    options += ["--data-parallel", "2", "--sequence-parallel", "2", "--tensor-parallel", "2", "--remat"]
    meshed, _ = train(tmp_path / "mesh", *options, devices=8)
    np.testing.assert_allclose(meshed["losses"], metrics["losses"], rtol=2e-3)


def test_packed_documents_are_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows hold whole documents, in which a model sees what it sees in each of them by itself."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"jax\.(array_ref|ArrayRef) is deprecated", DeprecationWarning)
        import train_gpt
    random = np.random.default_rng(0)
    documents = [random.integers(1, 256, size) for size in (12, 5, 2, 30)]
    rows = list(train_gpt.fill_rows(documents, length=20, most=2))
    assert [list(np.diff(row.boundaries)) for row in rows] == [[11, 4], [1, 0], [20, 0]]
    batch = next(train_gpt.stack(iter(rows), len(rows)))
    options = train_gpt.parse_arguments(["--layers", "1", "--width", "16", "--heads", "4", "--kv-heads", "2"])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        model = jax.jit(train_gpt.GPT(options, train_gpt.nnx.Rngs(0)).__call__)
        logits = model(batch.inputs, batch.boundaries)
        places = [(0, 0), (0, 11), (1, 0), (2, 0)]
        for (row, first), document in zip(places, documents, strict=True):
            inside = slice(first, first + min(len(document) - 1, 20))
            np.testing.assert_array_equal(batch.inputs[row, inside], document[:-1][:20])
            np.testing.assert_array_equal(batch.targets[row, inside], document[1:][:20])
            alone = model(jnp.asarray(document[None, :-1][:, :20]))
            np.testing.assert_allclose(logits[row, inside], alone[0], atol=1e-5)
    assert (batch.targets >= 0).sum() == sum(min(len(x) - 1, 20) for x in documents)


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module examples/generate.py, under the rules of promotion that a user has."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"jax\.(array_ref|ArrayRef) is deprecated", DeprecationWarning)
        import generate
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield generate


def test_generate_continues_a_trained_model(one_device: tuple[Path, dict[str, Any], str]) -> None:
    output, _, _ = one_device
    printed = run("examples/generate.py", "--run", str(output), "--prompt", "def f(", "x", "--tokens", "8")
    assert "attention of one query: XLA path" in printed and "--- 'def f(' ---\ndef f(" in printed
    assert re.search(r"attention of one query to pages: XLA path.*the pages are first gathered", printed)
    for how in ("by recomputation", "from the cache", "from pages"):
        assert re.search(rf"^[\d,]+ tokens/s {how}; 16 of 16 tokens are the same$", printed, re.M)


def test_generate_loads_what_was_trained(one_device: tuple[Path, dict[str, Any], str], generate: Any) -> None:
    model = generate.load(one_device[0], "auto")
    tokens = generate.pad(["import sys\n\n\ndef main(self):\n    return self"]).tokens

    def loss(network: Any) -> jax.Array:
        logits = jax.nn.log_softmax(network(tokens[:, :-1]))[0]
        return -jnp.mean(logits[jnp.arange(len(logits)), tokens[0, 1:]])

    untrained = generate.train_gpt.GPT(model.options, generate.nnx.Rngs(0))
    assert loss(generate.nnx.merge(model.graphdef, model.params)) < loss(untrained) - 1


@pytest.mark.parametrize("way", ["from_cache", "from_pages"])
def test_generate_has_the_logits_of_whole_texts(
    way: str, one_device: tuple[Path, dict[str, Any], str], generate: Any
) -> None:
    """Prompts of different lengths are in one batch, in float32."""
    model, prompts = generate.load(one_device[0], "auto"), generate.pad(["import sys", "def", "class"])
    seen: list[Any] = []

    def choose(logits: jax.Array, lengths: jax.Array) -> jax.Array:
        jax.debug.callback(lambda *x: seen.append(x), logits, lengths, ordered=True)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    found = getattr(generate, way)(model, prompts, choose, 6)
    jax.effects_barrier()
    logits, lengths = (np.stack(x, axis=1) for x in zip(*seen, strict=True))
    network = jax.jit(generate.nnx.merge(model.graphdef, model.params).__call__)
    for b, count in enumerate(prompts.counts.tolist()):
        text = np.concatenate([prompts.tokens[b, :count], found.tokens[b]])
        np.testing.assert_allclose(logits[b], network(text[None])[0, count - 1 : -1], atol=2e-5)
        assert lengths[b].tolist() == list(range(count, count + 6))


def test_generate_chooses_the_same_tokens_by_recomputation(
    one_device: tuple[Path, dict[str, Any], str], generate: Any
) -> None:
    model, prompts = generate.load(one_device[0], "auto"), generate.pad(["import sys", "def", "class"])
    drawn = []
    for temperature, seed in ((0.0, 0), (1.5, 0), (1.5, 1)):
        arguments = (model, prompts, generate.chooser(temperature, seed), 6)
        drawn.append(generate.from_cache(*arguments).tokens)
        np.testing.assert_array_equal(drawn[-1], generate.by_recomputation(*arguments).tokens)
        np.testing.assert_array_equal(drawn[-1], generate.from_pages(*arguments).tokens)
    assert len({tokens.tobytes() for tokens in drawn}) == 3


@pytest.mark.parametrize("in_pages", [False, True])
def test_generate_donates_its_cache(in_pages: bool, generate: Any) -> None:
    model = generate.load(None, "xla")
    capacities = np.array([7, 17])
    cache = generate.make_pages(model.options, capacities) if in_pages else generate.make_cache(model.options, 2, 7)
    before = [x.unsafe_buffer_pointer() for x in (*cache.keys, *cache.values)]
    step = generate.cached_step(model, generate.chooser(0.0, seed=0))
    new, _ = step(model.params, cache, jnp.ones((2, 1), jnp.int32), jnp.ones(2, jnp.int32))
    assert all(x.is_deleted() for x in jax.tree.leaves(cache))
    # A page table may stay where NumPy has allocated it, which XLA for CPUs cannot reuse.
    assert [x.unsafe_buffer_pointer() for x in (*new.keys, *new.values)] == before


def test_pages_of_sequences_take_turns(generate: Any) -> None:
    """The first sequence needs three pages and the second one; what is past them is written nowhere."""
    options = generate.load(None, "xla").options
    pages = generate.make_pages(options, np.array([33, 16]))
    assert pages.table.tolist() == [[0, 2, 3], [1, 4, 4]] and pages.keys[0].shape[:2] == (4, 16)
    positions = jnp.array([[15, 16, 32], [15, 16, 47]])
    ones = jnp.ones((2, 3, *pages.keys[0].shape[2:]), options.dtype)
    written = pages.write(1, ones, 2 * ones, positions)
    assert np.argwhere(written.keys[1][..., 0, 0]).tolist() == [[0, 15], [1, 15], [2, 0], [3, 0]]
    assert not written.keys[0].any() and written.values[1].max() == 2


def test_generate_says_what_a_run_lacks(generate: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        generate.parse_arguments(["--run", str(tmp_path)])
    assert "has no parameters.npz; pass the --output folder of a run of train_gpt.py" in capsys.readouterr().err


def test_mean_flow_samples_in_one_step() -> None:
    """Without the jvp in its target the same model samples at a distance of 0.9."""
    printed = run("examples/mean_flow.py", optimized=True)
    found = re.fullmatch(r"distance from the nearest wave: noise (\S+), samples in one step (\S+)\n", printed)
    assert found, printed
    noise, samples = map(float, found.groups())
    assert samples < 0.6 < 1 < noise


def test_sharpness_is_the_largest_eigenvalue_of_the_hessian(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = run("examples/sharpness.py", "--steps", "50", optimized=True)
    (before, _), (after, bound) = re.findall(r"step +\d+: loss (\S+), step sizes are stable up to (\S+)\n", printed)
    assert float(after) < 0.7 * float(before) and float(bound) > 0
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import sharpness

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        params, x = sharpness.init(jax.random.key(1)), jax.random.normal(jax.random.key(2), (4, 6, sharpness.WIDTH))
        found = sharpness.sharpness(lambda params: sharpness.loss(params, x), params, jax.random.key(3), steps=200)
        flat, unflatten = jax.flatten_util.ravel_pytree(params)
        monkeypatch.setattr(sharpness, "attention", jax.nn.dot_product_attention)
        hessian = jax.jit(jax.hessian(lambda flat: sharpness.loss(unflatten(flat), x)))(flat)
    eigenvalues = np.linalg.eigvalsh(np.asarray(hessian, np.float64))
    np.testing.assert_allclose(found, max(eigenvalues, key=abs), rtol=1e-3)


def test_benchmark_trains_with_one_implementation_after_the_other(tmp_path: Path) -> None:
    output = tmp_path / "gpt.json"
    tiny = TINY.replace("--steps 25", "--steps 3").split()
    run("benchmarks/train.py", "--implementations", "xla", "jax", "--output", str(output), "--", *tiny)
    ours, theirs = json.loads(output.read_text())["runs"]
    assert (ours["implementation"], theirs["implementation"]) == ("jax_fastattn (xla)", "jax.nn (xla)")
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=1e-4)
