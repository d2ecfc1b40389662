# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
r"""Trains a small byte-level GPT on the sources of Python's standard library, with attention by `jax_fastattn`.

    python examples/train_gpt.py              # minutes on two CPU cores; on a GPU the CUDA kernels, in bfloat16
    python examples/train_gpt.py --layers 12 --width 768 --heads 12 --kv-heads 4 --length 4096 --batch 8 \
        --learning-rate 6e-4 --output gpt-cuda
    python examples/train_gpt.py ... --implementation jax --output gpt-jax --compare gpt-cuda/metrics.json
    python examples/train_gpt.py --packed --length 1024 --batch 2       # whole documents, packed into rows

If a wheel is installed, `python -m jax_fastattn.examples.train_gpt` runs the same file without a clone.
It writes `metrics.json`, `loss.png` and `parameters.npz` to the output folder, then prints a sample and a summary.
`generate.py` continues prompts by these parameters. A seed fixes the initial parameters and the order of the data,
whatever the implementation and the mesh, so that curves can be compared. With `--packed`, a row holds documents of
their own lengths (`jax_fastattn.attention_varlen`), and the metrics compare its tokens per second with the rate for the
same documents padded to the longest one. Padding does not count as tokens.
It needs flax, optax, matplotlib and tqdm: the extra `examples` of jax_fastattn.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import sysconfig
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastattn

try:
    import flax
    import matplotlib
    import matplotlib.pyplot as plt
    import optax
    from flax import nnx
    from tqdm import trange
except ModuleNotFoundError as error:
    raise SystemExit(
        f"{error.name} is not installed. Install the extra `examples`: `pip install '.[examples]'` in a clone, or "
        "`[examples]` after the file name of the wheel."
    ) from error

VOCABULARY = 256  # bytes
HELD_OUT_EVERY = 20  # one file in twenty is never trained on
SHORTEST = 64  # bytes of a document, of those that are packed
PROMPT = b"def __init__(self, "
ATTENTION = {
    "auto": jax_fastattn.attention,
    "cuda": partial(jax_fastattn.attention, implementation="cuda"),
    "xla": partial(jax_fastattn.attention, implementation="xla"),
    "jax": jax.nn.dot_product_attention,
    "cudnn": partial(jax.nn.dot_product_attention, implementation="cudnn"),
}
PACKED_ATTENTION = {
    "auto": jax_fastattn.attention_varlen,
    "cuda": partial(jax_fastattn.attention_varlen, implementation="cuda"),
    "xla": partial(jax_fastattn.attention_varlen, implementation="xla"),
}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = partial(parser.add_argument, metavar="N", type=int)
    implementations = "of attention: auto, cuda and xla are jax_fastattn's; jax and cudnn are jax.nn's, to compare with"
    parser.add_argument("--implementation", choices=ATTENTION, default="auto", help=implementations)
    add("--layers", default=4)
    add("--width", default=128)
    add("--heads", default=4, help="query heads")
    add("--kv-heads", default=2, help="key/value heads, each shared by heads / kv-heads query heads")
    add("--length", default=128, help="tokens (bytes) per sequence")
    add("--batch", default=16, help="sequences per step, over all devices")
    parser.add_argument("--packed", action="store_true", help="fill a sequence with documents of their own lengths")
    add("--steps", default=300)
    add("--eval-every", default=100, help="steps from one held-out loss to the next")
    add("--sample", default=256, help="bytes to sample at the end")
    add("--seed", default=0)
    add("--data-parallel", default=1, help="devices that share a batch")
    add("--sequence-parallel", default=1, help="devices that share each sequence, by ring attention")
    add("--tensor-parallel", default=1, help="devices that share the query heads and the hidden features")
    parser.add_argument("--fsdp", action="store_true", help="split parameters over the devices that share a batch")
    parser.add_argument("--dropout", type=float, default=0.0, metavar="RATE", help="of attention weights, in training")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="at the peak of warm-up and cosine decay")
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default=dtype, help="default here: %(default)s")
    parser.add_argument(
        "--remat", action="store_true", help="recompute each block in its backward pass, except for attention"
    )
    parser.add_argument("--output", type=Path, default=Path("gpt-run"), help="folder of results")
    parser.add_argument(
        "--compare", type=Path, nargs="*", default=[], help="metrics.json of runs to draw in the same plot"
    )
    parser.add_argument("--quiet", action="store_true", help="print no progress bar and no sample")
    options = parser.parse_args(argv)
    if options.width % options.heads or options.heads % options.kv_heads or options.heads % options.tensor_parallel:
        parser.error("--kv-heads and --tensor-parallel must divide --heads, and that --width")
    if options.fsdp and options.width % options.data_parallel:
        parser.error("--data-parallel must divide --width with --fsdp")
    if options.batch % options.data_parallel:
        parser.error("--data-parallel must divide --batch")
    if options.length % options.sequence_parallel:
        parser.error("--sequence-parallel must divide --length")
    if options.packed and (options.implementation not in PACKED_ATTENTION or options.length < SHORTEST):
        parser.error(f"--packed needs --implementation auto, cuda or xla, and --length {SHORTEST} or more")
    if options.dropout and (options.implementation not in PACKED_ATTENTION or options.packed):
        parser.error("--dropout needs --implementation auto, cuda or xla, and no --packed")
    return options


# Data


def load_corpus() -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on and held-out bytes: the standard library's modules, split by file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = sorted(path for path in root.rglob("*.py") if skipped.isdisjoint(path.relative_to(root).parts))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for i, path in enumerate(files):
        parts[i % HELD_OUT_EVERY == 0].append(path.read_bytes())
    return np.frombuffer(b"\n\n".join(parts[0]), np.uint8), np.frombuffer(b"\n\n".join(parts[1]), np.uint8)


class Batch(NamedTuple):
    """Rows of tokens. Packed ones hold documents, row b the tokens boundaries[b, i] : boundaries[b, i + 1] of the i-th.

    Attributes:
        inputs: int32 [B, T].
        targets: int32 [B, T], one token further on; -1 for padding.
        boundaries: int32 [B, documents + 1]; None if rows are not packed.
    """

    inputs: Any
    targets: Any
    boundaries: Any = None


def documents(text: np.ndarray, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Functions, classes and whatever else two blank lines part, in random order, again and again."""
    found = [np.frombuffer(part, np.uint8) for part in text.tobytes().split(b"\n\n\n") if len(part) > SHORTEST]
    while True:
        for i in rng.permutation(len(found)):
            yield found[i]


def fill_rows(documents: Iterable[np.ndarray], length: int, most: int) -> Iterator[Batch]:
    """Rows [T] of as many whole documents, one after the other, as fit; a document longer than a row is cut."""
    row: list[np.ndarray] = []
    for document in documents:
        document = document[: length + 1]
        if len(row) == most or sum(len(x) - 1 for x in [*row, document]) > length:
            yield lay_out(row, length, most)
            row = []
        row.append(document)
    yield lay_out(row, length, most)


def stack(rows: Iterator[Batch], count: int) -> Iterator[Batch]:
    """Batches of so many rows."""
    while len(some := list(islice(rows, count))) == count:
        yield jax.tree.map(lambda *arrays: np.stack(arrays), *some)


def lay_out(row: list[np.ndarray], length: int, most: int) -> Batch:
    ends = np.cumsum([0, *(len(document) - 1 for document in row)], dtype=np.int32)
    inputs, targets = np.zeros(length, np.int32), np.full(length, -1, np.int32)
    inputs[: ends[-1]] = np.concatenate([document[:-1] for document in row])
    targets[: ends[-1]] = np.concatenate([document[1:] for document in row])
    # The last boundary again and again: empty documents, so that each row has as many.
    return Batch(inputs, targets, np.pad(ends, (0, most + 1 - len(ends)), mode="edge"))


# Model: [B, T] tokens -> [B, T, VOCABULARY] logits


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Applies the rotary position embedding (arXiv:2104.09864) of positions [1 or B, T] to x [B, T, N, H].

    Attention sees differences of positions alone, so that those of a row serve each of its documents.
    """
    half = x.shape[-1] // 2
    angles = (
        positions[:, :, None, None] / 10_000 ** (jnp.arange(half) / half)[None, None, None]
    )  # [1 or B, T, 1, H / 2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, options: argparse.Namespace, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, dtype=options.dtype, rngs=rngs)
        self.norm_1 = nnx.RMSNorm(options.width, dtype=options.dtype, rngs=rngs)
        self.norm_2 = nnx.RMSNorm(options.width, dtype=options.dtype, rngs=rngs)
        self.head_dim = options.width // options.heads
        self.implementation, self.dropout = options.implementation, options.dropout
        self.query = linear(options.width, options.width)
        self.key = linear(options.width, options.kv_heads * self.head_dim)
        self.value = linear(options.width, options.kv_heads * self.head_dim)
        self.out = linear(options.width, options.width)
        self.up = linear(options.width, 4 * options.width)
        self.down = linear(4 * options.width, options.width)

    def project(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns query [B, T, N, H], key and value [B, T, K, H] of x [B, T, C] at positions [1 or B, T]."""
        normed = self.norm_1(x)
        query, key, value = (
            project(normed).reshape(*x.shape[:2], -1, self.head_dim) for project in (self.query, self.key, self.value)
        )
        return rotate(query, positions), rotate(key, positions), value

    def finish(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Returns what follows attention [B, T, N, H]: its sum with x, and the MLP."""
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))

    def __call__(self, x: jax.Array, boundaries: jax.Array | None, key_of_dropout: jax.Array | None) -> jax.Array:
        query, key, value = self.project(x, jnp.arange(x.shape[1])[None])
        if boundaries is None:
            dropout = {"dropout_rate": self.dropout, "dropout_key": key_of_dropout}
            options = {} if key_of_dropout is None else dropout
            attended: Any = ATTENTION[self.implementation](query, key, value, is_causal=True, **options)
        else:
            attend = partial(PACKED_ATTENTION[self.implementation], is_causal=True)
            attended = jax.vmap(attend)(query, key, value, boundaries, boundaries)  # each row has its own
        return self.finish(x, attended)


class GPT(nnx.Module):
    def __init__(self, options: argparse.Namespace, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(VOCABULARY, options.width, dtype=options.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(options, rngs) for _ in range(options.layers)])
        self.norm = nnx.RMSNorm(options.width, dtype=options.dtype, rngs=rngs)
        self.head = nnx.Linear(options.width, VOCABULARY, use_bias=False, dtype=options.dtype, rngs=rngs)
        self.remat = options.remat

    def __call__(
        self, tokens: jax.Array, boundaries: jax.Array | None = None, key_of_dropout: jax.Array | None = None
    ) -> jax.Array:
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            key = None if key_of_dropout is None else jax.random.fold_in(key_of_dropout, i)
            x = call_with_remat(block, x, boundaries, key) if self.remat else block(x, boundaries, key)
        return self.head(self.norm(x)).astype(jnp.float32)


def call_with_remat(block: Block, *arrays: jax.Array | None) -> jax.Array:
    """block(*arrays), of which only what attention's backward pass needs is kept: the rest is computed again."""
    graphdef, params = nnx.split(block)
    policy = jax.checkpoint_policies.save_only_these_names("jax_fastattn_out", "jax_fastattn_lse")
    return jax.checkpoint(lambda params, *arrays: nnx.merge(graphdef, params)(*arrays), policy=policy)(params, *arrays)


# Training


def layout(mesh: Mesh, tree: Any, options: argparse.Namespace, *, fsdp: bool) -> Any:
    """Shardings of parameters, or of optimizer state, whose leaves bear the same names.

    Query heads and hidden features are split over "tensor", and so are key/value heads if there are enough. With `fsdp`
    the other axis of each matrix is split over "data". All else is copied to every device.
    """
    data = "data" if fsdp else None
    kv_heads = None if options.kv_heads % options.tensor_parallel else "tensor"
    layouts = dict.fromkeys(("query", "up"), P(data, "tensor")) | dict.fromkeys(("key", "value"), P(data, kv_heads))
    layouts |= {"out": P("tensor", data), "down": P("tensor", data), "embedding": P(None, data), "head": P(data, None)}

    def of_leaf(path: tuple[Any, ...], x: jax.Array) -> NamedSharding:
        del x
        names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        return NamedSharding(mesh, next((layouts[name] for name in names if name in layouts), P()))

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


def which_implementation(options: argparse.Namespace) -> str:
    """What runs attention on each device of the mesh."""
    if options.implementation not in ("auto", "cuda", "xla"):
        return {"jax": "jax.nn (xla)", "cudnn": "jax.nn (cudnn)"}.get(options.implementation, options.implementation)
    sizes, head_dim = (options.batch // options.data_parallel, options.length), options.width // options.heads
    heads = options.heads // options.tensor_parallel
    kv_heads = heads // min(options.heads // options.kv_heads, heads)
    query, key = (jax.ShapeDtypeStruct((*sizes, count, head_dim), options.dtype) for count in (heads, kv_heads))
    asked = None if options.implementation == "auto" else options.implementation
    found = jax_fastattn.explain(query, key, key, is_causal=True, implementation=asked)
    return f"jax_fastattn ({found.implementation})"


class Speed:
    """Tokens of steps, without padding, and the seconds that they take. The first five steps do not count."""

    def __init__(self):
        self.tokens: list[int] = []
        self.seconds: list[float] = []

    @contextmanager
    def of(self, batch: Batch) -> Iterator[None]:
        self.tokens.append(int((batch.targets >= 0).sum()))
        started = time.perf_counter()
        yield
        self.seconds.append(time.perf_counter() - started)

    def tokens_per_second(self) -> float:
        first = min(5, len(self.seconds) - 1)
        return statistics.mean(self.tokens[first:]) / statistics.median(self.seconds[first:])


def train(options: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Trains, samples, and returns what goes into metrics.json, and the parameters in the memory of the host."""
    sizes = (options.data_parallel, options.sequence_parallel, options.tensor_parallel)
    devices = jax.devices()[: int(np.prod(sizes))]
    mesh = jax.make_mesh(sizes, ("data", "sequence", "tensor"), axis_types=(AxisType.Auto,) * 3, devices=devices)
    implementation, device = which_implementation(options), f"{len(devices)} x {devices[0].device_kind}"
    corpus, held_out = load_corpus()
    graphdef, params = nnx.split(GPT(options, nnx.Rngs(options.seed)), nnx.Param)
    parameters = sum(x.size for x in jax.tree.leaves(params))
    print(f"{parameters / 1e6:.2f} M parameters, {len(corpus) / 1e6:.1f} MB of text, {implementation} on {device}")

    rate, warm_up = options.learning_rate, min(100, options.steps // 10 + 1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warm_up, options.steps + 1, 0.1 * rate)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))
    gathered = layout(mesh, params, options, fsdp=False)
    params = jax.device_put(params, layout(mesh, params, options, fsdp=options.fsdp))
    state = optimizer.init(params)
    state = jax.device_put(state, layout(mesh, state, options, fsdp=options.fsdp))

    @jax.jit
    def evaluate(params: Any, batch: Batch, key_of_dropout: jax.Array | None = None) -> jax.Array:
        params = jax.lax.with_sharding_constraint(params, gathered)  # else XLA may gather activations instead
        logits = nnx.merge(graphdef, params)(batch.inputs, batch.boundaries, key_of_dropout)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch.targets, 0))
        return jnp.mean(losses, where=batch.targets >= 0)

    layouts = jax.tree.map(lambda x: x.sharding, (params, state))

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=(*layouts, None))
    def update(params: Any, state: Any, batch: Batch, key_of_dropout: jax.Array | None) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(evaluate)(params, batch, key_of_dropout)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    @jax.jit
    def sample(params: Any, text: jax.Array, key: jax.Array) -> jax.Array:
        def extend(i: jax.Array, text: jax.Array) -> jax.Array:
            logits = nnx.merge(graphdef, params)(text)[0, i - 1]  # causal: what follows has no say
            return text.at[0, i].set(jax.random.categorical(jax.random.fold_in(key, i), logits / 0.8))

        return jax.lax.fori_loop(len(PROMPT), text.shape[1], extend, text)

    def put(batch: Batch) -> Batch:
        # Tokens whose sequences are split are all that attention needs to run over the devices of "sequence".
        boundaries = None if batch.boundaries is None else P("data")
        layouts = Batch(P("data", "sequence"), P("data", "sequence"), boundaries)
        return jax.device_put(batch, jax.tree.map(partial(NamedSharding, mesh), layouts))

    def batches(seed: int, text: np.ndarray) -> Iterator[Batch]:
        rng = np.random.default_rng(seed)
        if options.packed:
            yield from stack(fill_rows(documents(text, rng), options.length, options.length // SHORTEST), options.batch)
        while True:
            starts = rng.integers(0, len(text) - options.length, options.batch)
            tokens = text[starts[:, None] + np.arange(options.length + 1)].astype(np.int32)
            yield Batch(tokens[:, :-1], tokens[:, 1:])

    training, held_out_batches = batches(options.seed, corpus), islice(batches(options.seed + 1, held_out), 8)
    held_out_batches = [put(batch) for batch in held_out_batches]
    losses, held_out_losses, speed = [], [], Speed()
    # Each step drops other weights, and every mesh the same ones.
    keys = jax.random.split(jax.random.key(options.seed), options.steps) if options.dropout else [None] * options.steps
    compiled = update.lower(params, state, held_out_batches[0], keys[0]).compile()
    progress = trange(1, options.steps + 1, desc="training", unit="step", disable=options.quiet)
    for step in progress:
        batch = put(next(training))
        with speed.of(batch):
            params, state, loss = compiled(params, state, batch, keys[step - 1])
            losses.append(float(loss))  # waits for the device, so that the clock is honest
        if step % options.eval_every == 0 or step == options.steps:
            held_out_loss = statistics.mean(float(evaluate(params, batch)) for batch in held_out_batches)
            held_out_losses.append((step, held_out_loss))
        progress.set_postfix(loss=losses[-1], held_out=held_out_losses[-1][1] if held_out_losses else "-")

    text = np.zeros((1, len(PROMPT) + options.sample), np.int32)
    text[0, : len(PROMPT)] = list(PROMPT)
    sampled = sample(params, jnp.asarray(text), jax.random.key(options.seed))
    trained, padded = jax.device_get(params), Speed()
    if options.packed:  # the first documents again, one in each row
        count = options.batch * 20
        again = [x[: options.length + 1] for x in islice(documents(corpus, np.random.default_rng(options.seed)), count)]
        longest, devices_of_row = max(len(document) for document in again) - 1, options.sequence_parallel
        rows = fill_rows(again, -(-longest // devices_of_row) * devices_of_row, most=1)
        for batch in stack(rows, options.batch):
            batch = put(batch._replace(boundaries=None))
            with padded.of(batch):
                params, state, loss = update(params, state, batch, None)
                jax.block_until_ready(loss)
    metrics = {
        "options": {name: value for name, value in vars(options).items() if name not in ("output", "compare", "quiet")},
        "implementation": implementation,
        "device": device,
        "versions": {"jax": jax.__version__, "flax": flax.__version__, "python": platform.python_version()},
        "parameters": parameters,
        "collectives": collectives(compiled.as_text() or ""),
        "tokens_per_second": speed.tokens_per_second(),
        "padded_tokens_per_second": padded.tokens_per_second() if options.packed else None,
        "losses": losses,
        "held_out_losses": held_out_losses,
        "sample": bytes(np.asarray(sampled[0]).tolist()).decode(errors="replace"),
    }
    return metrics, trained


def named_leaves(params: Any) -> dict[str, Any]:
    """Returns the arrays of parameters by name, as parameters.npz has them."""
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}


def collectives(hlo: str) -> dict[str, int]:
    """How many collectives of each kind and shape a step has."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= (.+?) ({kinds})(?:-start)?\(", hlo)
    return dict(Counter(f"{kind} {shape}" for shape, kind in sorted(found)))


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Draws the loss curves of several runs into one PNG: lines are training losses, points held-out losses."""
    matplotlib.use("Agg")
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for below, run in zip(reversed(range(len(runs))), runs, strict=True):  # wider below, so that equal curves both show
        label = f"{run['implementation']}, {run['device']}: {run['tokens_per_second']:,.0f} tokens/s"
        (line,) = axes.plot(range(1, len(run["losses"]) + 1), run["losses"], linewidth=0.8 + 2 * below, label=label)
        axes.plot(*zip(*run["held_out_losses"], strict=True), "o", markersize=5 + 4 * below, color=line.get_color())
    axes.set(xlabel="step", ylabel="cross-entropy [nats per byte]", title="training (lines) and held-out loss (points)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    options = parse_arguments(argv)
    metrics, params = train(options)
    options.output.mkdir(parents=True, exist_ok=True)
    np.savez(options.output / "parameters.npz", **named_leaves(params))
    (options.output / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    plot([json.loads(path.read_text()) for path in options.compare] + [metrics], options.output / "loss.png")
    if not options.quiet:
        print(f"\n--- sample ---\n{metrics['sample']}\n--------------\n")
    first, last, held_out = metrics["losses"][0], metrics["losses"][-1], metrics["held_out_losses"][-1][1]
    padded = metrics["padded_tokens_per_second"]
    print(
        f"loss {first:.3f} -> {last:.3f}, held out {held_out:.3f}; {metrics['tokens_per_second']:,.0f} tokens/s with "
        f"{metrics['implementation']} on {metrics['device']}; "
        + (f"{padded:,.0f} tokens/s with the same documents padded to the longest; " if padded else "")
        + f"see {options.output}/loss.png"
    )


if __name__ == "__main__":
    main()
