# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Options that describe calls of `attention`, and the `Case`s that they stand for. Commands with shapes share them."""

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import Any, NoReturn

import jax.numpy as jnp

from jax_fastattn.canonical import validation
from jax_fastattn.canonical.arguments import matmul_precision
from jax_fastattn.cases.case import Case
from jax_fastattn.cases.coverage import COVERAGE
from jax_fastattn.cases.models import MODELS, layers_by_name
from jax_fastattn.cli.errors import UsageError
from jax_fastattn.kernels.architectures import ARCHITECTURES

# These arguments of `attention` are arrays or results of their own.
WITH = (
    "mask",
    "segment_ids",
    "query_seq_lengths",
    "key_value_seq_lengths",
    "query_offset",
    "sinks",
    "return_residual",
)
_DTYPES = ("bfloat16", "float16", "float32")
# Lengths and offsets are a Python number for each entry.
_MAX_BATCH = 1 << 16
_UNPACKED = ("mask", "segment_ids", "query_seq_lengths", "key_value_seq_lengths")


@dataclasses.dataclass(frozen=True)
class Size:
    """Batch size and lengths of a call."""

    batch: int
    query_length: int
    key_length: int


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a call, except for its batch size and lengths."""
    group = parser.add_argument_group("the call")
    models = f"the attention of a model, one of {', '.join(MODELS)}; may be repeated"
    group.add_argument("--model", action="append", choices=MODELS, metavar="MODEL", help=models)
    group.add_argument("--heads", type=_heads, metavar="N[/K]", help="query heads, and key/value heads if fewer")
    group.add_argument("--head-dim", type=_head_dims, metavar="H[/D]", help="of query and key, and of value if another")
    group.add_argument("--causal", action="store_true", help="is_causal=True")
    group.add_argument(
        "--window", type=_window, metavar="LEFT/RIGHT", help="local_window_size, such as 4095/0; `none` is unlimited"
    )
    group.add_argument("--soft-cap", type=_soft_cap, metavar="CAP", help="logits_soft_cap")
    group.add_argument(
        "--dtype", choices=_DTYPES, default=_DTYPES[0], metavar="DTYPE", help=f"one of {', '.join(_DTYPES)}"
    )
    group.add_argument(
        "--bias", type=_bias, metavar="AXES[/DTYPE]", help="a bias with these axes of bnts, in the dtype of the query"
        " or in another one, such as nts or bs/float32; others have size 1",
    )  # fmt: skip
    group.add_argument("--deterministic", action="store_true", help="deterministic=True")
    group.add_argument("--precise-gradients", action="store_true", help="precise_gradients=True")
    group.add_argument("--packed", action="store_true", help="attention_varlen: the batch entries are packed")
    group.add_argument(
        "--with", dest="operands", nargs="+", action="extend", choices=WITH, default=[], metavar="NAME",
        help=f"arguments that the call has too: {', '.join(WITH)}",
    )  # fmt: skip


def add_size(parser: argparse.ArgumentParser, batch_help: str, length_help: str, *, required: bool = False) -> None:
    """Adds the options of batch size and lengths."""
    group = parser.add_argument_group("its size")
    group.add_argument("--batch", type=_batch, metavar="B", help=batch_help)
    group.add_argument("--length", type=_lengths, metavar="T[/S]", required=required, help=length_help)


def add_arch(parser: argparse.ArgumentParser, text: str) -> None:
    """Adds the option of architectures."""
    parser.add_argument("--arch", action="append", type=_architecture, metavar="ARCH", help=text)


def layers(options: argparse.Namespace) -> dict[str, Case]:
    """Returns the calls that the options describe, by name, in any size.

    Raises:
        UsageError: options are missing or exclude each other.
    """
    named = [f"--{name.replace('_', '-')}" for name in _OWN_SHAPE if getattr(options, name)]
    if options.model and named:
        raise UsageError(f"--model sets the whole call; leave out {', '.join(named)}")
    if not options.model and not (options.heads and options.head_dim):
        raise UsageError("pass --heads and --head-dim, such as --heads 32/8 --head-dim 128, or --model")
    operands = [*(["bias"] if options.bias else []), *options.operands]
    if options.packed and (names := [name for name in operands if name in ("bias", *_UNPACKED)]):
        raise UsageError(f"attention_varlen, and so --packed, has no {', '.join(names)}; leave out --packed or these")
    found = _models(options.model) if options.model else {"call": _own_shape(options)}
    more = {name: getattr(options, name) for name in ("dtype", *_FLAGS)}
    more |= {"precision": matmul_precision(jnp.dtype(options.dtype))}
    return {name: dataclasses.replace(case, **more) for name, case in found.items()}


def describes_call(options: argparse.Namespace) -> bool:
    """Returns whether any option describes a call."""
    names = (*_OWN_SHAPE, "model", *_FLAGS, "packed", "bias", "operands", "batch", "length")
    return any(getattr(options, name) for name in names) or options.dtype != "bfloat16"


_OWN_SHAPE = ("heads", "head_dim", "causal", "window", "soft_cap")
_FLAGS = ("deterministic", "precise_gradients")


def _models(names: list[str]) -> dict[str, Case]:
    return {kind: case for name in names for kind, case in layers_by_name(name).items()}


def _own_shape(options: argparse.Namespace) -> Case:
    (heads, kv_heads), (head_dim, v_head_dim) = options.heads, options.head_dim
    return Case(
        num_kv_heads=kv_heads,
        group=heads // kv_heads,
        head_dim=head_dim,
        v_head_dim=None if v_head_dim == head_dim else v_head_dim,
        is_causal=options.causal,
        window=options.window or (None, None),
        logits_soft_cap=options.soft_cap,
    )


def sized(layer: Case, options: argparse.Namespace, size: Size) -> Case:
    """Returns a call of `layers` in one size, with the arguments of `--with` and `--bias`."""
    batch, query_length, key_length = size.batch, size.query_length, size.key_length
    names = options.operands
    changes: dict[str, Any] = {"batch": batch, "query_length": query_length, "key_length": key_length}
    if options.packed:
        lengths = (query_length,) * batch, (key_length,) * batch
        changes = {"batch": 1, "query_length": batch * query_length, "key_length": batch * key_length}
        changes |= {"packed": lengths}
    offset = "bottom_right" if options.packed else (key_length - query_length,) * batch
    values: dict[str, dict[str, Any]] = {
        "mask": {"mask": "bnts"},
        "segment_ids": {"segments": 3},
        "query_seq_lengths": {"query_seq_lengths": (query_length,) * batch},
        "key_value_seq_lengths": {"key_value_seq_lengths": (key_length,) * batch},
        "query_offset": {"query_offset": offset},
        "sinks": {"sinks": "n"},
        "return_residual": {"dlse": True},
    }
    for name in names:
        changes |= values[name]
    if options.bias:
        axes, dtype = options.bias
        changes |= {"bias": axes, "bias_dtype": dtype or layer.dtype}
    return dataclasses.replace(layer, **changes)


def describe(case: Case) -> str:
    """Returns a call in words."""
    sequences = "" if case.packed is None else f"{len(case.packed[0])} packed sequences, "
    head_dims = f"{case.head_dim}" + (f"/{case.v_head_dim}" if case.v_head_dim else "")
    words = [
        f"{sequences}batch {case.batch}, {_count(case.query_length, 'query', 'queries')}",
        _count(case.key_length, "key", "keys"),
        f"heads {case.num_heads}/{case.num_kv_heads}",
        f"head dim {head_dims}",
        case.dtype,
        "causal" if case.is_causal else None,
        None if case.window == (None, None) else f"window {'/'.join(map(_side, case.window))}",
        None if case.scale is None else f"scale {case.scale:.4g}",
        None if case.logits_soft_cap is None else f"soft cap {case.logits_soft_cap:g}",
        "deterministic" if case.deterministic else None,
        "precise gradients" if case.precise_gradients else None,
        *(name for name in case.spec().present if name not in ("query", "key", "value", "sequences")),
        "gradient of the log-sum-exp" if case.dlse else None,
    ]
    return ", ".join(word for word in words if word)


def _count(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _side(side: int | None) -> str:
    return "none" if side is None else str(side)


def _refuse(text: str, expected: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"`{text}` is not {expected}")


def _integers(text: str, expected: str, least: int = 1) -> list[int]:
    """Returns the integers of `A` or `A/B`."""
    words = text.split("/")
    if len(words) > 2 or not all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words):
        _refuse(text, expected)
    found = [int(word) for word in words]
    if min(found) < least:
        _refuse(text, expected)
    return found


def positive(text: str) -> int:
    """Returns a positive integer."""
    if "/" in text:
        _refuse(text, "a positive integer")
    return _integers(text, "a positive integer")[0]


def _batch(text: str) -> int:
    batch = positive(text)
    if batch > _MAX_BATCH:
        raise argparse.ArgumentTypeError(f"`{text}` is over {_MAX_BATCH}")
    return batch


def _pair(text: str, expected: str) -> tuple[int, int]:
    found = _integers(text, expected)
    return found[0], found[-1]


def _heads(text: str) -> tuple[int, int]:
    expected = "a number of heads such as 32, or 32/8 for 32 query and 8 key/value heads"
    heads, kv_heads = _pair(text, expected)
    if heads % kv_heads:
        raise argparse.ArgumentTypeError(
            f"`{text}` has {kv_heads} key/value heads, which do not divide the {heads} query heads"
        )
    return heads, kv_heads


def _head_dims(text: str) -> tuple[int, int]:
    return _pair(text, "a head dim such as 128, or 192/128 if that of value is another")


def _lengths(text: str) -> tuple[int, int]:
    return _pair(text, "a length such as 4096, or 1/4096 for 1 query and 4096 keys")


def _architecture(text: str) -> str:
    if text not in ARCHITECTURES:
        known = ", ".join(f"{name} ({COVERAGE[name].gpus})" for name in ARCHITECTURES)
        _refuse(text, f"an architecture that has kernels; pass one of {known}")
    return text


def _window(text: str) -> tuple[int | None, int | None]:
    expected = "a window LEFT/RIGHT such as 4095/0 or 127/none"
    words = text.split("/")
    if len(words) != 2:
        _refuse(text, expected)
    left, right = (None if word == "none" else _integers(word, expected, least=0)[0] for word in words)
    return left, right


def _bias(text: str) -> tuple[str, str | None]:
    """Returns the axes of a bias, and its dtype if that is not the query's."""
    axes, slash, dtype = text.partition("/")
    if not axes or not re.fullmatch("b?n?t?s?", axes) or (slash and dtype not in _DTYPES):
        _refuse(text, f"axes of bnts in this order, such as nts, nor these and one of {', '.join(_DTYPES)}: bs/float32")
    return axes, dtype or None


def _soft_cap(text: str) -> float:
    try:
        return validation.check_scalar("logits_soft_cap", float(text), positive=True)
    except ValueError:
        _refuse(text, "a positive number that float32 holds")
