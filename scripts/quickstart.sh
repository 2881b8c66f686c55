#!/usr/bin/env bash
# Installs everything into .venv and runs vLLM on the bundled tiny pair, without speculation and with dartree.
# Arguments go to `vllm-dartree demo`.
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
exec .venv/bin/vllm-dartree demo "$@"
