#!/bin/sh
# Kernels of MODELS (config.json files, folders or names that `liger warmup` knows) for ARCHS, compiled into the folder KERNELS, which may then be moved and
# mounted read-only (LIGER_TRITON_BASE_CACHE). PRECISIONS: "bfloat16" as FSDP2 and bf16 training have it, "float32:bfloat16" weights and autocast of the rest.
set -eu
# without MODELS the image has no kernels: for CPUs, or where pods compile them
: "${ARCHS?}" "${MODELS?}" "${KERNELS:?}"
mkdir -p "$KERNELS"
for model in $MODELS; do
    for arch in $ARCHS; do
        for precision in ${PRECISIONS:-bfloat16 float32:bfloat16}; do
            dtype=${precision%%:*} autocast=
            case $precision in *:*) autocast="--autocast ${precision#*:}" ;; esac
            echo "$model, $precision"
            # shellcheck disable=SC2086
            TRITON_CACHE_DIR=$KERNELS liger warmup --model "$model" --arch "$arch" --dtype "$dtype" $autocast
        done
    done
done
find "$KERNELS" -name '*.tmp' -o -name 'tmp.pid_*' | grep . && exit 1 # nothing half written
chmod -R a+rX,a-w "$KERNELS"
