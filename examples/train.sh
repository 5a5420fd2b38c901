#!/usr/bin/env bash
# Pre-trains a LLaMA-2: examples/train.sh SIZE STRATEGY [ARCH] [FLAGS of pretrain_gpt.py]
#   SIZE      1B 3B 7B 13B 30B 40B, with TRAINING=cola 60M 130M 350M 1B 7B
#   STRATEGY  full-rank, or of a low-rank model vanilla, btp or no-tp (TP 1)
#   ARCH      of a low-rank model: cola, svd or lax
# FLAGS come last and win. The variables are explained in examples/README.md. With DRY_RUN=1 the
# command is printed, and the planner's view of it, instead of run (DRY_RUN=command: alone).
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TABLE=$ROOT/megatron/boost/recipes/recipes.txt
BIN=$([[ -x $ROOT/.venv/bin/torchrun ]] && echo "$ROOT/.venv/bin/" || true)

refuse() {
    echo "error: $1" >&2
    exit 2
}

# row KIND NAME…: what stands after these words in the table of the recipes.
row() {
    local cells legal=()
    while read -ra cells || ((${#cells[@]})); do
        if [[ "${cells[*]:0:$#}" == "$*" ]]; then
            echo "${cells[@]:$#}"
            return
        fi
        [[ "${cells[*]:0:$#-1}" == "${*:1:$#-1}" ]] && legal+=("${cells[$# - 1]}")
    done <"$TABLE"
    refuse "$*: no such row in $TABLE; its last word may be ${legal[*]}"
}

SIZE=${1:-} STRATEGY=${2:-} ARCH=${3:-} TRAINING=${TRAINING:-llama2} DEVICE=${DEVICE:-cuda}
case $STRATEGY in
full-rank)
    ARCH=dense
    shift 2
    ;;
vanilla | btp | no-tp)
    [[ $ARCH =~ ^(cola|svd|lax)$ ]] || refuse "ARCH '$ARCH': legal values: cola, svd, lax"
    shift 3
    ;;
*)
    refuse "STRATEGY '$STRATEGY': legal values: full-rank, vanilla, btp, no-tp \
(examples/train.sh SIZE STRATEGY [ARCH] [FLAGS of pretrain_gpt.py])"
    ;;
esac
[[ ${1:---} == -* ]] || refuse "'$1' after the recipe's name: is no flag; leave it out"
facts=$(row training "$TRAINING" && row course "$TRAINING" "$SIZE" && row model "$SIZE" &&
    row layout "$TRAINING" "$SIZE" "$STRATEGY")
read -r -d '' SEQUENCE BATCH BETA2 EPSILON DECAY CLIP NORM_EPSILON LR WARMUP ITERATIONS \
    HIDDEN FFN HEADS LAYERS RANK MLP GPUS TP PP VIRTUAL MICRO_BATCH SP RECOMPUTE <<<"$facts" || true

for name in GPUS_PER_NODE NNODES MASTER_PORT; do
    [[ ${!name:-1} =~ ^[1-9][0-9]*$ ]] || refuse "$name=${!name}: is no whole number of at least 1"
done
((${MASTER_PORT:-1} < 65536)) || refuse "MASTER_PORT=$MASTER_PORT: is above 65535"
[[ $DEVICE =~ ^(auto|cuda|cpu)$ ]] || refuse "DEVICE=$DEVICE: legal values: auto, cuda, cpu"
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
# Without GPUs a recipe is cut, its layout too.
[[ $DEVICE == cpu ]] && NNODES=${NNODES:-1}
NNODES=${NNODES:-$(((GPUS + GPUS_PER_NODE - 1) / GPUS_PER_NODE))}
if ((NNODES > 1)) && [[ ! ${DRY_RUN:-} && ! (${MASTER_ADDR:-} && ${NODE_RANK:-}) ]]; then
    refuse "NNODES=$NNODES: on each node set NODE_RANK, and MASTER_ADDR to the first one's name; \
examples/train.sbatch does"
fi

# Kernels then start in the order in which they are issued. A collective that is issued before a
# GEMM would otherwise wait behind it, and BTP hides the all-reduces of its backward behind GEMMs.
# Megatron demands it for TP > 1 on GPUs older than Blackwell; FSDP, which is not used here, forbids it.
export CUDA_DEVICE_MAX_CONNECTIONS=1
# NCCL says what is wrong, and nothing else; INFO shows the rings and the network that it chose.
# Where that is the wrong network, NCCL_SOCKET_IFNAME and NCCL_IB_HCA name the right one. On nodes with
# NVSwitch the switch itself sums up all-reduces (NVLS); NCCL_NVLS_ENABLE=0 gives its buffers back.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

DISTRIBUTED_ARGS=(
    --nnodes "$NNODES"
    --node-rank "${NODE_RANK:-0}"
    --nproc-per-node "$GPUS_PER_NODE"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-29500}"
)
MODEL_ARGS=(
    --num-layers "$LAYERS"
    --hidden-size "$HIDDEN"
    --ffn-hidden-size "$FFN"
    --num-attention-heads "$HEADS"
    --seq-length "$SEQUENCE"
    --max-position-embeddings "$SEQUENCE"
    --position-embedding-type rope
    --normalization RMSNorm
    --norm-epsilon "$NORM_EPSILON"
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
)
PARALLEL_ARGS=(
    --device "$DEVICE"
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
[[ $SP == yes ]] && PARALLEL_ARGS+=(--sequence-parallel)
LOW_RANK_ARGS=(--low-rank-arch "$ARCH")
((VIRTUAL > 1)) && PARALLEL_ARGS+=(--num-virtual-stages-per-pipeline-rank "$VIRTUAL")
if [[ $STRATEGY != full-rank ]]; then
    # Without TP there is no boundary to choose.
    LOW_RANK_ARGS+=(--low-rank-tp "${STRATEGY/no-tp/btp}" --low-rank-rank "$RANK")
    [[ $ARCH != svd ]] && LOW_RANK_ARGS+=(--low-rank-mlp "$MLP")
fi
case $RECOMPUTE in
latents) LOW_RANK_ARGS+=(--low-rank-recompute) ;;
full) PARALLEL_ARGS+=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1) ;;
esac
TENTH=${LR%e-*}e-$((${LR#*e-} + 1))
TRAINING_ARGS=(
    --bf16
    --micro-batch-size "$MICRO_BATCH"
    --global-batch-size "$BATCH"
    --train-iters "$ITERATIONS"
    --lr "$LR"
    --min-lr "$TENTH"
    --lr-decay-style cosine
    --lr-warmup-iters "$WARMUP"
    --adam-beta1 0.9
    --adam-beta2 "$BETA2"
    --adam-eps "$EPSILON"
    --weight-decay "$DECAY"
    --clip-grad "$CLIP"
)
DATA_ARGS=(--split 99,1,0)
if [[ ${DATA_PATH:-} ]]; then
    [[ ${TOKENIZER_MODEL:-} ]] || refuse "DATA_PATH=$DATA_PATH: needs TOKENIZER_MODEL, a folder, beside it"
    DATA_ARGS+=(
        --data-path "$DATA_PATH"
        --tokenizer-type HuggingFaceTokenizer
        --tokenizer-model "$TOKENIZER_MODEL"
    )
else
    [[ ${TOKENIZER_MODEL:-} ]] && refuse "TOKENIZER_MODEL=$TOKENIZER_MODEL: needs DATA_PATH beside it"
    DATA_ARGS+=(--mock-data --tokenizer-type NullTokenizer --vocab-size 32000)
fi
LOGGING_ARGS=(
    --log-interval 10
    --log-throughput
    --eval-interval 1000
    --eval-iters 10
)
if [[ ${CHECKPOINT_PATH:-} ]]; then
    LOGGING_ARGS+=(--save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --save-interval 1000)
fi
[[ ${TENSORBOARD_PATH:-} ]] && LOGGING_ARGS+=(--tensorboard-dir "$TENSORBOARD_PATH")
if [[ ${WANDB_PROJECT:-} ]]; then
    LOGGING_ARGS+=(--wandb-project "$WANDB_PROJECT" --wandb-exp-name "$SIZE-$STRATEGY-$ARCH")
    LOGGING_ARGS+=(--wandb-save-dir "${WANDB_DIR:-wandb}")
fi

COMMAND=(
    "${BIN}torchrun" "${DISTRIBUTED_ARGS[@]}" "$ROOT/pretrain_gpt.py"
    "${MODEL_ARGS[@]}" "${LOW_RANK_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}"
    "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
)
[[ ${DRY_RUN:-} ]] || exec "${COMMAND[@]}"

echo "export CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_DEBUG=$NCCL_DEBUG"
printf '%q' "${COMMAND[0]}"
for word in "${COMMAND[@]:1}"; do
    [[ $word == --* || $word == *.py ]] && printf ' \\\n   '
    printf ' %q' "$word"
done
echo
if [[ $DRY_RUN == command || ! -f $ROOT/tools/plan.py ]]; then
    exit
elif ! "${BIN}python" -c 'import torch' 2>/dev/null; then
    echo "# No plan: the planner needs PyTorch (run make first)"
else
    "${BIN}python" "$ROOT/tools/plan.py" --model "$SIZE" --gpus $((NNODES * GPUS_PER_NODE)) \
        --gpu "${GPU:-h100}" --gpus-per-node "$GPUS_PER_NODE" --arch "${ARCH/dense/cola}" --rank "$RANK" --seq-length "$SEQUENCE" \
        --global-batch-size "$BATCH" --strategies "${STRATEGY/no-tp/btp}" | sed '/^To launch/,$d; s/^/# /'
    echo "# The recipe's own layout is TP $TP, PP $PP, micro-batch $MICRO_BATCH; flags after its name \
are not in this plan"
fi
