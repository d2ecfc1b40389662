# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
#
# Prints a Python that can run tests/environments.py, which then looks for the best one. A name on PATH may be a shim
# that starts nothing, so each candidate is tried.

for python in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3 \
  "$(pyenv root 2>/dev/null)"/versions/3.1[1-9]*/bin/python; do
  if [ -n "$python" ] && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "$python"
    exit
  fi
done
echo "Found no Python 3.11 or newer. Install one, or name it: PYTHON=/path/to/python sh $0" >&2
exit 1
