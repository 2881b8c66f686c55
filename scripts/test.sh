#!/usr/bin/env bash
# Installs everything into .venv and runs the tests, the files of tests spread over two processes. Arguments go to pytest;
# -n0 runs them in one. In the order of their names: pytest-xdist would start the files with few tests last, which are the
# long ones.
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
export HF_HUB_OFFLINE=1
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
