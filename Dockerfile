# The environment for GPUs, with the checkout in /opt/megatron-sao. Use with enroot/pyxis and apptainer: docs/running.md.
#   docker build -t megatron-sao .
FROM nvcr.io/nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends \
        build-essential cmake git ninja-build python3-dev python3-pip python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /opt/megatron-sao
COPY . .
RUN python3 -m pip install --no-cache-dir setuptools wheel pybind11 && PIP_NO_CACHE_DIR=1 tools/install_gpu.sh
