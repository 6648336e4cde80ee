#!/usr/bin/env bash
# The tables of training steps and operators in docs/benchmarks, on your machine:  benchmarks/reproduce.sh OUT [steps|largest|batches|operators ...]   (default: all)
# OUT gets a JSON file and a log a command, and the plots. GPUS=4 spreads the batches over four (default: all there are).
set -euo pipefail
here=$(dirname "$(realpath "$0")")
out=$(realpath -m "${1:?a folder for the results}")
shift
mkdir -p "$out"
upstream=$out/upstream
[ -d "$upstream" ] || python -m pip install -q --no-deps --target "$upstream" liger-kernel==0.8.5
gpus=${GPUS:-$(python -c "import torch; print(torch.cuda.device_count())")}
spread=$([ "$gpus" -gt 1 ] && echo "--gpus $gpus --parallel fsdp2" || true)

bench() { # NAME ARGUMENTS
    local name=$1
    shift
    echo "== $name: liger bench $*"
    # a variant of ours that fails ends the command with 1; the others were measured all the same
    liger bench "$@" --upstream-path "$upstream" --json "$out/$name.json" 2>&1 | tee "$out/$name.log" || true
}

steps() {
    bench steps-1b step --model llama-3.2-1b --batch 4 --seq 4096 --against stock,compile,upstream,ours,ours+layers,ours+compile --profile
    bench steps-others step --model gemma-2b,llama-3-8b-4layers --batch 4 --seq 2048 --against stock,compile,upstream,ours,ours+compile --profile
    python "$here/draw.py" "$out"/steps-*.json "$out"
}

largest() {
    local search="step --batch 1 --seq 2048 --optimizer adamw --largest-batch --largest-seq --steps 2 --warmup 2 --against upstream,ours"
    bench largest-8b-lora $search --model llama-3-8b --lora 16
    bench largest-3b-1b $search --model llama-3.2-3b,llama-3.2-1b
}

batches() {
    local curve="step $spread --optimizer adamw --seq 512 --lengths 95 --steps 4 --warmup 2 --against stock,upstream,ours"
    bench batches-8b $curve --model llama-3-8b --batch 8,16,32,48,64,96
    bench batches-8b-checkpointing $curve --model llama-3-8b --batch 32,64,96,128,192 --checkpointing
    bench batches-7b $curve --model gemma-7b --batch 8,16,32,48,64
    bench batches-7b-checkpointing $curve --model gemma-7b --batch 32,64,96,128 --checkpointing
    python "$here/draw.py" "$out"/batches-*.json "$out"
}

operators() {
    bench operators --against eager,compile,torch,upstream
    python "$here/draw.py" "$out/operators.json" "$out"
}

for stage in "${@:-steps largest batches operators}"; do
    for each in $stage; do "$each"; done
done
