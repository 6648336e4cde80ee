#!/usr/bin/env bash
# The tables of docs/benchmarks/multi-gpu.md, on the GPUs of your machine:  benchmarks/several_gpus.sh OUT [checks|sharded|adapters|large|experts|rows|vocabulary ...]   (default: all)
# OUT gets a CSV and a JSON file a stage. GPUS=2 takes so many of them. UPSTREAM, UNSLOTH, VERL and TORCHTITAN are folders with liger-kernel 0.8.5, Unsloth, verl 0.9.1 and
# torchtitan 0.2.2; without them they are left out. PATIENCE=200 ends a stage after so many seconds.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:?a folder for the results}")
shift
mkdir -p "$out"
gpus=${GPUS:-$(python -c "import torch; print(torch.cuda.device_count())")}
upstream=${UPSTREAM:+--upstream-path $UPSTREAM} unsloth=${UNSLOTH:+--unsloth-path $UNSLOTH}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}

beside() { # NAME [FLAGS]: standard input has the commands; an empty line ends a group whose models are built side by side
    local name=$1
    shift
    cat >"$out/$name.commands"
    echo "== $name"
    timeout "${PATIENCE:-3600}" python benchmarks/side_by_side.py "$out/$name.commands" "$out/$name.csv" "$@" && return
    echo "$name: exit code $?"
    sleep 40 # ranks of a stage that was stopped have 30 s to leave the GPUs
}

checks() { # ranks against one process over NCCL, and launchers whose workers are killed, each on two of the GPUs
    CUDA_VISIBLE_DEVICES=0,1 timeout "${PATIENCE:-3600}" python -m pytest -p no:cacheprovider -q tests/test_parallel.py &
    local parity=$!
    CUDA_VISIBLE_DEVICES=$([ "$gpus" -ge 4 ] && echo 2,3 || echo 0,1) LIGER_TEST_DEVICE=cuda timeout "${PATIENCE:-3600}" \
        python -m pytest -p no:cacheprovider -q -m elastic tests/train/test_runtime.py -k "launcher or machine or moment" || echo "launchers: exit code $?"
    wait $parity || echo "parity: exit code $?"
}

sharded() {
    local step="--model llama-3-8b --gpus $gpus --parallel fsdp2 --optimizer adamw --steps 8 --warmup 3"
    for size in "--batch 2 --seq 2048" "--batch 16 --seq 512"; do
        printf '%s\n%s\n' "$step $size $upstream --against stock,${UPSTREAM:+upstream,}ours" "$step $size --fp8 tensorwise --against ours,ours:gathered,torchao:gathered"
    done | beside sharded
}

adapters() {
    local step="--model llama-3-8b --gpus $gpus --parallel ddp --lora 16 --autocast --optimizer adamw --batch 2 --seq 2048 --steps 8 --warmup 4 --against stock,${UNSLOTH:+unsloth,}ours $unsloth"
    printf '%s\n%s\n' "$step" "$step --quantize nf4" | beside adapters
}

large() { # stock without checkpointing needs what the weights of those that wait would take
    local step="--model llama-3-70b --layers 24 --gpus $gpus --parallel fsdp2 --optimizer adamw --seq 512 --steps 4 --warmup 2"
    printf '%s\n' "$step --batch 24 --checkpointing --against stock,ours" "$step --batch 16,24 --against ours" "" "$step --batch 16,24 --against stock" | beside large
}

experts() { # TRANSFORMERS is a folder with Transformers 5.23, unless it is installed
    local step="--model qwen3-30b-a3b --gpus $gpus --optimizer adamw --batch 4 --seq 2048 --checkpointing --steps 8 --warmup 4"
    printf '%s\n' "$step --parallel fsdp2 --against stock,ours" "$step --parallel ep --against stock,ours" |
        PYTHONPATH=${TRANSFORMERS:+$TRANSFORMERS:}$PYTHONPATH beside experts
    if [ -n "${TORCHTITAN:-}" ]; then
        echo "== experts, torchtitan"
        timeout "${PATIENCE:-3600}" python benchmarks/experts_torchtitan.py "$out/experts-torchtitan.csv" --torchtitan "$TORCHTITAN" --gpus "$gpus" --steps 8 --warmup 4 || echo "torchtitan: exit code $?"
    fi
}

rows() { # 262,144 tokens a GPU; attention computes nothing, as a step would take minutes
    printf '%s\n' "--model llama-3-8b --gpus $gpus --parallel ulysses-fsdp2 --batch 1 --seq $((262144 * gpus)) --checkpointing --optimizer adamw --against ours:offload-tiled" |
        beside rows --without-attention
    printf '%s\n' "--model llama-3-8b --gpus $gpus --parallel ulysses-fsdp2 --batch 1 --seq $((32768 * gpus)) --checkpointing --optimizer adamw --against ours:long" |
        beside rows-with-attention --one-step
}

vocabulary() {
    echo "== vocabulary"
    timeout "${PATIENCE:-3600}" python benchmarks/sharded_head.py "$out/vocabulary.csv" --gpus "$gpus" ${VERL:+--verl "$VERL"} ${UPSTREAM:+--upstream "$UPSTREAM"} \
        --variants ours 'ours, no entropy' ${VERL:+verl} ${UPSTREAM:+product+upstream} || echo "vocabulary: exit code $?"
}

for stage in "${@:-checks sharded adapters large experts rows vocabulary}"; do
    for each in $stage; do "$each"; done
done
