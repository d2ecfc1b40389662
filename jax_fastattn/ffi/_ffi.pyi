# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0

initialize: object
launch: object
launch_on_host: object

def set_library_paths(runtime: str, driver: str, zlib: str = ...) -> None: ...
