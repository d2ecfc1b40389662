# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Trains the GPT of `examples/train_gpt.py` with ours and others' attention, one after the other in one process.

    python benchmarks/train.py --implementations cuda cudnn fa4-jax --output gpt.json -- --layers 12 --length 4096

What follows `--` are options of the example. Parameters and data are the same for all, so that losses can be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
from run import describe_run

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import train_gpt


def fa4_jax(query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool) -> jax.Array:
    """FlashAttention-4's kernels, as the example calls attention."""
    from fa4_jax import flash_attn

    return flash_attn(query, key, value, causal=is_causal, scale=query.shape[-1] ** -0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    train_gpt.ATTENTION["fa4-jax"] = fa4_jax
    parser.add_argument("--implementations", nargs="+", choices=train_gpt.ATTENTION, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--commit", help="to record, where this is not a git checkout")
    parser.add_argument("options", nargs="*", help="of the example")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for name in options.implementations:
        arguments = [*options.options, "--implementation", name, "--quiet"]
        runs.append(train_gpt.train(train_gpt.parse_arguments(arguments))[0])
        print(f"{name}: {runs[-1]['tokens_per_second']:,.0f} tokens/s, last loss {runs[-1]['losses'][-1]:.3f}")
        record = {"runs": runs} | describe_run(options.commit)
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
