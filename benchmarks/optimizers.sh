#!/usr/bin/env bash
# Whole steps with each optimizer of `liger bench step`, on one GPU: tokens/s and peak memory, the optimizer's state in it.
# benchmarks/optimizers.sh [FOLDER] writes one JSON and one CSV for each command. It needs torchao and g++, and the last command more than 64 GB of the CPU's memory.
set -u
out=${1:-runs/optimizers}
mkdir -p "$out"
spread="--steps 14 --warmup 6 --seq 2048"

step() { # NAME FLAGS...: a failure, such as too little memory, ends this command only
    local name=$1
    shift
    echo "== $name"
    liger bench step $spread "$@" --json "$out/$name.json" --csv "$out/$name.csv" || echo "$name: exit code $?"
}

for model in llama-3.2-1b llama-3-8b-4layers; do
    for optimizer in sgd adamw adamw-bf16 adamw-8bit adamw-8bit-bf16; do
        step "$model-$optimizer" --model $model --batch 4 --against stock,ours --optimizer $optimizer
        step "$model-$optimizer-in-backward" --model $model --batch 4 --against stock,ours --optimizer $optimizer --optimizer-in-backward
    done
    # the same loop with and without weights, gradients and moments in the CPU's memory
    step "$model-adamw-fsdp2" --model $model --batch 4 --against ours --optimizer adamw --gpus 1 --parallel fsdp2
    step "$model-adamw-fsdp2-on-cpu" --model $model --batch 4 --against ours --optimizer adamw --gpus 1 --parallel fsdp2 --optimizer-on-cpu
    step "$model-adamw-8bit-bf16-fsdp2" --model $model --batch 4 --against ours --optimizer adamw-8bit-bf16 --gpus 1 --parallel fsdp2
done
# all of Llama-3-8B on one GPU: 8 bytes per parameter in bf16 with adamw, 4 with the last one
for flags in "adamw" "adamw --optimizer-in-backward" "adamw-8bit-bf16" "adamw-8bit-bf16 --optimizer-in-backward"; do
    step "llama-3-8b-${flags// --optimizer/}" --model llama-3-8b --batch 1 --against ours --optimizer $flags
done
step "llama-3-8b-adamw-on-cpu" --model llama-3-8b --batch 1 --against ours --optimizer adamw --gpus 1 --parallel fsdp2 --optimizer-on-cpu
