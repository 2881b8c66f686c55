#!/usr/bin/env bash
# Installs everything into .venv; runs vLLM on the bundled tiny pair, without speculation and with dartree; then compares
# DARTree with chains and other trees on the same pair. Arguments go to `vllm-dartree demo`.
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
.venv/bin/vllm-dartree demo "$@"
echo
exec .venv/bin/vllm-dartree compare --max-samples 4
