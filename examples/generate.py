# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Continues prompts by the GPT of `train_gpt.py`, from a key/value cache, and compares that with recomputation.

    python examples/generate.py                      # random parameters: seconds on two CPU cores
    python examples/train_gpt.py --output gpt-run && python examples/generate.py --run gpt-run

Prompts of different lengths share a batch. One function appends tokens to the cache: all tokens of the prompts first,
then one token at a time. `query_offset` is the number of tokens that a sequence has before them. Each step donates its
cache to the next one, which writes into the same memory, and one compiled program serves all steps of one token.
Recomputation runs the whole model over all tokens at every step. The time of the prompts counts, that of compilation
does not. In bfloat16 both may round differently, so that a token and those after it may differ.
If a wheel is installed, `python -m jax_fastattn.examples.generate` runs the same file without a clone.
Needs flax, optax, matplotlib and tqdm, as `train_gpt.py` does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_fastattn

sys.path.append(str(Path(__file__).parent))  # where it is not, if this runs as a module of a wheel
import train_gpt

PROMPTS = ["def __init__(self, ", "import ", "class Error(Exception):\n"]


class Cache(NamedTuple):
    """The keys and values of all tokens so far.

    Attributes:
        keys, values: [B, capacity, K, H] for each block; rows of a sequence from its length on are not used yet.
        lengths: int32 [B], the number of tokens of each sequence.
    """

    keys: list[jax.Array]
    values: list[jax.Array]
    lengths: jax.Array


def make_cache(options: argparse.Namespace, batch: int, capacity: int) -> Cache:
    shape = (batch, capacity, options.kv_heads, options.width // options.heads)
    keys, values = ([jnp.zeros(shape, options.dtype) for _ in range(options.layers)] for _ in range(2))
    return Cache(keys, values, jnp.zeros(batch, jnp.int32))


def extend(model: train_gpt.GPT, cache: Cache, tokens: jax.Array, counts: jax.Array) -> tuple[Cache, jax.Array]:
    """Appends the first counts[b] of tokens [B, T] to each sequence; returns the logits [B, VOCABULARY] that follow.

    The tokens from counts[b] on are padding. The next call overwrites their keys and values; until then they are
    hidden, because they stand after all tokens of their sequence.
    """
    row = jnp.arange(len(tokens))
    positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])[None]  # [B, T]
    lengths = cache.lengths + counts
    x, keys, values = model.embedding(tokens), [], []
    for block, old_keys, old_values in zip(model.blocks, cache.keys, cache.values, strict=True):
        query, key, value = block.project(x, positions)
        keys.append(old_keys.at[row[:, None], positions].set(key))  # [B, capacity, K, H]
        values.append(old_values.at[row[:, None], positions].set(value))
        attend = partial(train_gpt.ATTENTION[block.implementation], is_causal=True)
        attended = attend(query, keys[-1], values[-1], query_offset=cache.lengths, key_value_seq_lengths=lengths)
        x = block.finish(x, attended)
    logits = model.head(model.norm(x[row, counts - 1])).astype(jnp.float32)
    return Cache(keys, values, lengths), logits


Choose = Callable[[jax.Array, jax.Array], jax.Array]


def chooser(temperature: float, seed: int) -> Choose:
    """Returns a function of logits [B, VOCABULARY] and the sequences' lengths [B] that gives the next tokens [B]."""
    if temperature == 0:
        return lambda logits, lengths: jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def choose(logits: jax.Array, lengths: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), lengths[0])  # another one at every step
        return jax.random.categorical(key, logits / temperature).astype(jnp.int32)

    return choose


class Model(NamedTuple):
    """The options of a run of `train_gpt.py`, and its model, split by `nnx.split`."""

    options: argparse.Namespace
    graphdef: Any
    params: Any


def load(run: Path | None, implementation: str) -> Model:
    """Returns the model of a run of `train_gpt.py`; without one, a model of its default size with random parameters."""
    options = train_gpt.parse_arguments([])
    if run is not None:
        vars(options).update(json.loads((run / "metrics.json").read_text())["options"])
    options.implementation = implementation
    graphdef, params = nnx.split(train_gpt.GPT(options, nnx.Rngs(options.seed)), nnx.Param)
    if run is not None:
        with np.load(run / "parameters.npz") as saved:
            leaves = [jnp.asarray(saved[name]) for name in train_gpt.named_leaves(params)]
        params = jax.tree.unflatten(jax.tree.structure(params), leaves)
    return Model(options, graphdef, params)


class Prompts(NamedTuple):
    """Tokens int32 [B, T], with padding at the end, and how many each sequence has, int32 [B]."""

    tokens: jax.Array
    counts: jax.Array


def pad(texts: list[str]) -> Prompts:
    parts = [list(text.encode()) for text in texts]
    longest = max(map(len, parts))
    tokens = [part + [0] * (longest - len(part)) for part in parts]
    return Prompts(jnp.array(tokens, jnp.int32), jnp.array(list(map(len, parts)), jnp.int32))


class Generated(NamedTuple):
    """New tokens int32 [B, count], and how many of them there are in a second."""

    tokens: np.ndarray
    tokens_per_second: float


def cached_step(model: Model, choose: Choose) -> Any:
    """Returns a jitted function that appends counts[b] of tokens [B, T]; it gives the cache and the next token [B]."""

    @partial(jax.jit, donate_argnames="cache")
    def step(params: Any, cache: Cache, tokens: jax.Array, counts: jax.Array) -> tuple[Cache, jax.Array]:
        cache, logits = extend(nnx.merge(model.graphdef, params), cache, tokens, counts)
        return cache, choose(logits, cache.lengths)

    return step


def from_cache(model: Model, prompts: Prompts, choose: Choose, count: int) -> Generated:
    """Continues prompts by count tokens, each of which costs one pass over one token."""
    batch, longest = prompts.tokens.shape
    cache, ones = make_cache(model.options, batch, longest + count), jnp.ones(batch, jnp.int32)
    step = cached_step(model, choose)
    # Each is compiled once. A compiled program raises an error for other shapes.
    prefill = step.lower(model.params, cache, *prompts).compile()
    decode = step.lower(model.params, cache, prompts.tokens[:, :1], ones).compile()
    started = time.perf_counter()
    cache, token = prefill(model.params, cache, *prompts)
    tokens = [token]
    for _ in range(count - 1):
        cache, token = decode(model.params, cache, token[:, None], ones)
        tokens.append(token)
    jax.block_until_ready(token)
    seconds = time.perf_counter() - started
    return Generated(np.stack(tokens, axis=1), batch * count / seconds)


def by_recomputation(model: Model, prompts: Prompts, choose: Choose, count: int) -> Generated:
    """Returns the same tokens as `from_cache`; each of them costs one pass over all tokens."""
    batch, row = len(prompts.tokens), jnp.arange(len(prompts.tokens))

    @partial(jax.jit, donate_argnames="text")
    def step(params: Any, text: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = nnx.merge(model.graphdef, params)(text)[row, lengths - 1]  # causal: what follows has no say
        return text.at[row, lengths].set(choose(logits, lengths)), lengths + 1

    text, lengths = jnp.pad(prompts.tokens, ((0, 0), (0, count))), prompts.counts
    compiled = step.lower(model.params, text, lengths).compile()
    started = time.perf_counter()
    for _ in range(count):
        text, lengths = compiled(model.params, text, lengths)
    jax.block_until_ready(text)
    seconds = time.perf_counter() - started
    new = prompts.counts[:, None] + jnp.arange(count)[None]
    return Generated(np.asarray(text[row[:, None], new]), batch * count / seconds)


def explain_decoding(model: Model, batch: int, capacity: int) -> Any:
    """Returns what runs attention in a step of one token."""
    cache = jax.eval_shape(lambda: make_cache(model.options, batch, capacity))
    key, value = cache.keys[0], cache.values[0]
    query = jax.ShapeDtypeStruct((batch, 1, model.options.heads, key.shape[-1]), key.dtype)
    asked = None if model.options.implementation == "auto" else model.options.implementation
    lengths = {"query_offset": cache.lengths, "key_value_seq_lengths": cache.lengths}
    return jax_fastattn.explain(query, key, value, is_causal=True, implementation=asked, **lengths)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="output folder of train_gpt.py (default: random parameters, no text)")
    parser.add_argument("--prompt", nargs="+", default=PROMPTS, help="one for each sequence (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="new ones (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="X", help="0: the likeliest (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of tokens drawn at a temperature")
    parser.add_argument("--implementation", choices=train_gpt.PACKED_ATTENTION, default="auto", help="of attention")
    options = parser.parse_args(argv)
    if options.tokens < 1 or not all(options.prompt):
        parser.error("--tokens must be at least 1, and no --prompt may be empty")
    if options.run is not None and not (options.run / "parameters.npz").exists():
        parser.error(f"--run {options.run} has no parameters.npz; pass the --output folder of a run of train_gpt.py")
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse_arguments(argv)
    model, prompts = load(options.run, options.implementation), pad(options.prompt)
    batch, longest = prompts.tokens.shape
    print(f"attention of one query: {explain_decoding(model, batch, longest + options.tokens)}")
    choose = chooser(options.temperature, options.seed)
    cached = from_cache(model, prompts, choose, options.tokens)
    if options.run is not None:  # random parameters give no text
        for prompt, tokens in zip(options.prompt, cached.tokens, strict=True):
            print(f"--- {prompt!r} ---\n{prompt}{bytes(tokens.tolist()).decode(errors='replace')}")
        print("---")
    recomputed = by_recomputation(model, prompts, choose, options.tokens)
    speeds = [f"{found.tokens_per_second:,.0f} tokens/s" for found in (cached, recomputed)]
    same = (cached.tokens == recomputed.tokens).sum()
    print(
        f"{speeds[0]} from the cache, {speeds[1]} by recomputation; {same} of {cached.tokens.size} tokens are the same"
    )


if __name__ == "__main__":
    main()
