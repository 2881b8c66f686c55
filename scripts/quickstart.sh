#!/usr/bin/env bash
# Installs everything into .venv and compares DARTree with chains and other trees on the bundled tiny pair.
# Arguments go to `vllm-dartree compare`.
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
exec .venv/bin/vllm-dartree compare --max-samples 16 "$@"
