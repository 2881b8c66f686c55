#!/usr/bin/env bash
# Installs everything into .venv and runs the tests. Arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
export HF_HUB_OFFLINE=1
exec .venv/bin/python -m pytest "$@"
