#!/usr/bin/env bash
# Installs the pinned GPU environment into the active virtual environment (or container), in the order that works, with a
# check after every step:  tools/install_gpu.sh [--with-apex]
# Needs: an NVIDIA driver of branch 580 or newer (CUDA 13); Python 3.12 or 3.13; for Transformer Engine's torch part, which
# is compiled here, a CUDA 13 toolkit with nvcc, cuDNN's headers and a C++17 compiler. Every step may be repeated.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
te=$(sed -n 's/^transformer-engine==//p' requirements.txt)

step() { printf '\n== %s\n' "$*"; }
check() { "$python" -c "$1" || { echo "install_gpu: the step above did not take; see its output" >&2; exit 1; }; }
pip() { "$python" -m pip install --no-deps "$@"; }

step "what must be there already"
check 'import sys; assert sys.version_info[:2] in ((3, 12), (3, 13)), f"Python {sys.version.split()[0]}: use 3.12 or 3.13"'
if command -v nvidia-smi >/dev/null; then
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n1)
    [ "${driver%%.*}" -ge 580 ] || { echo "install_gpu: driver $driver; CUDA 13 needs 580 or newer" >&2; exit 1; }
else
    echo "no nvidia-smi here (an image build?): the driver is checked by 'megatron-sao doctor' on the machine that runs it"
fi
command -v nvcc >/dev/null || { echo "install_gpu: no nvcc on PATH; install a CUDA 13 toolkit or load its module" >&2; exit 1; }

step "1 torch and all that comes as wheels, pinned"
grep -vE '^transformer-engine' requirements.txt > "${TMPDIR:-/tmp}/megatron-sao-wheels.txt"
pip -r "${TMPDIR:-/tmp}/megatron-sao-wheels.txt"
check 'import torch; assert torch.version.cuda.startswith("13."), f"torch is built for CUDA {torch.version.cuda}"'

step "2 Transformer Engine, its torch part compiled against the torch just installed"
pip "transformer-engine==$te" "transformer-engine-cu13==$te"
MAX_JOBS=${MAX_JOBS:-8} pip --no-build-isolation "transformer-engine-torch==$te"
check 'import transformer_engine.pytorch'

step "3 Megatron-Core and SGLang"
check 'import megatron.core, sglang'

if [ "${1:-}" = --with-apex ]; then
    step "4 NVIDIA apex, from source (the package of that name on the index is another project)"
    pip --no-build-isolation --config-settings="--build-option=--cpp_ext" --config-settings="--build-option=--cuda_ext" \
        "apex @ git+https://github.com/NVIDIA/apex"
    check 'import apex.optimizers'
fi

step "this project"
pip --no-build-isolation --editable .
echo; echo "installed; on a machine with GPUs now run: megatron-sao doctor --serve"
