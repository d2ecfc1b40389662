# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Continues prompts by the GPT of `train_gpt.py`, by recomputation, from a key/value cache, and from one in pages.

    python examples/generate.py                      # random parameters: seconds on two CPU cores
    python examples/train_gpt.py --output gpt-run && python examples/generate.py --run gpt-run

Prompts of different lengths share a batch. One function appends tokens to the cache: all tokens of the prompts first,
then one token at a time. `query_offset` is the number of tokens that a sequence has before them. Each step donates its
cache to the next one, which writes into the same memory, and one compiled program serves all steps of one token.
Pages hold as many rows as the sequences need, where a dense cache has room for the longest one in each of them; a table
says where the pages of a sequence lie. Recomputation runs the whole model over all tokens at every step. The time of
the prompts counts, the time of compilation does not. In bfloat16 the three may round differently, so that a token and
all after it may differ.
If a wheel is installed, `python -m jax_fastattn.examples.generate` runs the same file without a clone.
It needs flax, optax, matplotlib and tqdm, as `train_gpt.py` does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import jax_fastattn

sys.path.append(str(Path(__file__).parent))  # where it is not, if this runs as a module of a wheel
import train_gpt
from train_gpt import nnx  # it says what to install if there is no flax

PAGE = 16  # rows of a page, a multiple of 16
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

    def write(self, layer: int, key: jax.Array, value: jax.Array, positions: jax.Array) -> Cache:
        """Writes the keys and values of new tokens, whose positions are [B, T]; returns the cache with them."""
        place = jnp.arange(len(positions))[:, None], positions
        return self._replace(keys=_set(self.keys, layer, place, key), values=_set(self.values, layer, place, value))

    def attend(self, layer: int, query: jax.Array, lengths: jax.Array, implementation: str) -> jax.Array:
        """Attends to the first lengths[b] tokens of each sequence; the query stands after those that were there."""
        attend = partial(train_gpt.ATTENTION[implementation], is_causal=True)
        where = {"query_offset": self.lengths, "key_value_seq_lengths": lengths}
        return attend(query, self.keys[layer], self.values[layer], **where)


class Pages(NamedTuple):
    """The same keys and values in pages.

    Attributes:
        keys, values: [P, PAGE, K, H] for each block. Token i of a sequence is in row i % PAGE of a page.
        lengths: int32 [B], the number of tokens of each sequence.
        table: int32 [B, M], the page of each PAGE tokens. Entries that a sequence never needs are P; what is written to
            that page is dropped.
    """

    keys: list[jax.Array]
    values: list[jax.Array]
    lengths: jax.Array
    table: jax.Array

    def write(self, layer: int, key: jax.Array, value: jax.Array, positions: jax.Array) -> Pages:
        """See `Cache.write`."""
        place = jnp.take_along_axis(self.table, positions // PAGE, axis=1), positions % PAGE
        return self._replace(keys=_set(self.keys, layer, place, key), values=_set(self.values, layer, place, value))

    def attend(self, layer: int, query: jax.Array, lengths: jax.Array, implementation: str) -> jax.Array:
        """See `Cache.attend`."""
        pages = self.keys[layer], self.values[layer], self.table
        attend = partial(jax_fastattn.paged_attention, is_causal=True, implementation=asked(implementation))
        return attend(query, *pages, lengths, query_offset=self.lengths)


AnyCache = TypeVar("AnyCache", Cache, Pages)


def _set(arrays: list[jax.Array], layer: int, place: Any, x: jax.Array) -> list[jax.Array]:
    return [old.at[place].set(x) if i == layer else old for i, old in enumerate(arrays)]


def asked(implementation: str) -> Any:
    """Returns the argument of jax_fastattn's functions for an `--implementation`."""
    return None if implementation == "auto" else implementation


def make_cache(options: argparse.Namespace, batch: int, capacity: int) -> Cache:
    """Returns an empty cache with room for so many tokens of each sequence."""
    return Cache(*_zeros(options, (batch, capacity)), jnp.zeros(batch, jnp.int32))


def make_pages(options: argparse.Namespace, capacities: np.ndarray) -> Pages:
    """Returns empty pages with room for capacities[b] tokens of sequence b. The sequences' pages take turns."""
    needed = -(-capacities // PAGE)
    is_needed = np.arange(needed.max()) < needed[:, None]  # [B, M]
    table = np.full(is_needed.shape, needed.sum(), np.int32)
    table.T[is_needed.T] = np.arange(needed.sum())
    keys, values = _zeros(options, (int(needed.sum()), PAGE))
    return Pages(keys, values, jnp.zeros(len(table), jnp.int32), jnp.asarray(table))


def _zeros(options: argparse.Namespace, rows: tuple[int, int]) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns keys and values of each block; every array has memory of its own, since steps donate it."""
    shape = (*rows, options.kv_heads, options.width // options.heads)
    keys, values = ([jnp.zeros(shape, options.dtype) for _ in range(options.layers)] for _ in range(2))
    return keys, values


def extend(model: train_gpt.GPT, cache: AnyCache, tokens: jax.Array, counts: jax.Array) -> tuple[AnyCache, jax.Array]:
    """Appends the first counts[b] of tokens [B, T] to each sequence; returns the logits [B, VOCABULARY] that follow.

    The tokens from counts[b] on are padding. The next call overwrites their keys and values; until then they are
    hidden, because they stand after all tokens of their sequence.
    """
    positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])[None]  # [B, T]
    lengths = cache.lengths + counts
    x = model.embedding(tokens)
    for i, block in enumerate(model.blocks):
        query, key, value = block.project(x, positions)
        cache = cache.write(i, key, value, positions)
        x = block.finish(x, cache.attend(i, query, lengths, block.implementation))
    logits = model.head(model.norm(x[jnp.arange(len(x)), counts - 1])).astype(jnp.float32)
    return cache._replace(lengths=lengths), logits


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
    def step(params: Any, cache: AnyCache, tokens: jax.Array, counts: jax.Array) -> tuple[AnyCache, jax.Array]:
        cache, logits = extend(nnx.merge(model.graphdef, params), cache, tokens, counts)
        return cache, choose(logits, cache.lengths)

    return step


def from_cache(model: Model, prompts: Prompts, choose: Choose, count: int) -> Generated:
    """Continues prompts by count tokens, each of which costs one pass over one token."""
    batch, longest = prompts.tokens.shape
    return _extended(model, make_cache(model.options, batch, longest + count), prompts, choose, count)


def from_pages(model: Model, prompts: Prompts, choose: Choose, count: int) -> Generated:
    """Returns the same tokens as `from_cache`, whose cache lies in pages."""
    pages = make_pages(model.options, np.asarray(prompts.counts) + count)
    return _extended(model, pages, prompts, choose, count)


def _extended(model: Model, cache: Cache | Pages, prompts: Prompts, choose: Choose, count: int) -> Generated:
    batch, ones = len(prompts.tokens), jnp.ones_like(prompts.counts)
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


def explain_decoding(model: Model, cache: Cache | Pages) -> Any:
    """Returns what runs attention in a step of one token."""
    key, value = cache.keys[0], cache.values[0]
    query = jax.ShapeDtypeStruct((len(cache.lengths), 1, model.options.heads, key.shape[-1]), key.dtype)
    where: dict[str, Any] = {"is_causal": True, "query_offset": cache.lengths}
    if isinstance(cache, Pages):
        where |= {"page_table": cache.table, "lengths": cache.lengths}
    else:
        where |= {"key_value_seq_lengths": cache.lengths}
    return jax_fastattn.explain(query, key, value, implementation=asked(model.options.implementation), **where)


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
    cache = jax.eval_shape(lambda: make_cache(model.options, batch, longest + options.tokens))
    pages = make_pages(model.options, np.asarray(prompts.counts) + options.tokens)
    print(f"attention of one query: {explain_decoding(model, cache)}")
    print(f"attention of one query to pages: {explain_decoding(model, pages)}")
    choose = chooser(options.temperature, options.seed)
    cached = from_cache(model, prompts, choose, options.tokens)
    if options.run is not None:  # random parameters give no text
        for prompt, tokens in zip(options.prompt, cached.tokens, strict=True):
            print(f"--- {prompt!r} ---\n{prompt}{bytes(tokens.tolist()).decode(errors='replace')}")
        print("---")
    recomputed = by_recomputation(model, prompts, choose, options.tokens)
    paged = from_pages(model, prompts, choose, options.tokens)
    for how, found in (("by recomputation", recomputed), ("from the cache", cached), ("from pages", paged)):
        same = (found.tokens == recomputed.tokens).sum()
        print(f"{found.tokens_per_second:,.0f} tokens/s {how}; {same} of {found.tokens.size} tokens are the same")


if __name__ == "__main__":
    main()
