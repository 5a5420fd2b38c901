# An image for the recipes of examples/, on NVIDIA's PyTorch with its CUDA, NCCL, Transformer Engine
# and apex. It has not been built where the project is tested, which has no Docker.
#   docker build -t boost .
#   docker run --gpus all --ipc host --ulimit memlock=-1 -it boost examples/train.sh 1B btp cola

# 26.05 brings Python 3.12, PyTorch 2.12 and CUDA 13.2; the project needs 3.12 and 2.11 at least.
ARG BASE=nvcr.io/nvidia/pytorch:26.05-py3
FROM ${BASE}

WORKDIR /workspace/boost
COPY . .

# What the base was built of stays: these constraints stand in for its own, which pin everything.
# Editable, so that `megatron` is a plain folder beside pip's. Without isolation the build sees the
# base's torch and nvcc, and compiles csrc for the architectures named here.
ARG ARCHITECTURES="8.0;9.0+PTX"
RUN pip list --format=freeze \
        | grep -iE '^(torch|torchvision|triton|transformer[-_]engine|apex|flash[-_]attn)[a-z_-]*==' \
        > /tmp/base.txt \
    && export PIP_CONSTRAINT=/tmp/base.txt BOOST_BUILD=cuda TORCH_CUDA_ARCH_LIST="${ARCHITECTURES}" \
    && pip install --no-cache-dir 'setuptools>=77' wheel \
    && pip install --no-cache-dir --no-build-isolation --editable . \
    && python -m boost_layers.ops
