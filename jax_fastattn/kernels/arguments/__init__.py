# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What launches take: buffers and scalars by name, and which of them a compile key has. Imports no DSL."""
