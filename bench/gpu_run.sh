#!/usr/bin/env bash
# What a machine with an NVIDIA GPU is to say of lowkv, from a folder that `make gpu-folder` has prepared: nothing is
# fetched or built. Needs the driver, a Python with torch for CUDA (for `python` and `decode` transformers, too, and pytest),
# and of CUDA's tools compute-sanitizer and ncu for `sanitizer` and `counts`.
#
#     bash gpu_run.sh [tests] [python] [llama] [attention] [decode] [sanitizer] [counts]   by default all, five minutes
set -uo pipefail
cd "$(dirname "$0")"
export PYTHONPATH="$PWD/site" PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore LOWKV_TEST_DEVICE=own
out=${OUT:-$PWD}
failed=0
part() { printf '\n== %s (%s s)\n' "$*" "$SECONDS"; }
try() { "$@" || { failed=1; echo "FAILED: $*"; }; }
parts=${*:-tests python llama attention decode sanitizer counts}

part "machine"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader

if [[ $parts == *tests* ]]; then
    for name in codes attention caller; do
        part "test_gpu_$name"
        try timeout 120 "./test_gpu_$name"
    done
fi
if [[ $parts == *python* ]]; then
    part "models on the GPU, their caches there"
    try timeout 120 python3 -m pytest -q -p no:cacheprovider test_gpu.py
fi
if [[ $parts == *llama* ]]; then
    part "stock llama.cpp, its packed cache on the GPU and on the processor"
    export LD_LIBRARY_PATH=$PWD/llama GGML_BACKEND_PATH=$PWD/llama/libggml-lowkv.so
    prompt=$(for i in {1..60}; do printf 'a lighthouse keeper, %s; ' "$i"; done)
    for scheme in exact lowkv2.8 lowkv2 kivi2 kivi4 turboquant4; do
        for device in cpu cuda; do
            LOWKV_SCHEME=$scheme LOWKV_DEVICE=$device timeout 60 llama/llama-completion -m model.gguf -dev LOWKV \
                -p "$prompt" -n 48 --temp 0 -no-cnv --ignore-eos -t 8 -fa on >$device.txt 2>$device.log ||
                { failed=1; echo "FAILED: $scheme on $device"; }
        done
        grep 'lowkv: active' cuda.log || { failed=1; tail -5 cuda.log; }
        # The processor rounds queries to 8 bits: packed rows need not give the same text.
        if cmp -s cpu.txt cuda.txt; then
            echo "$scheme: the same text"
        else
            [[ $scheme == exact ]] && failed=1
            echo "$scheme: another text"
        fi
    done
    for device in cpu cuda; do
        LOWKV_DEVICE=$device try timeout 100 llama/llama-bench -m model.gguf -dev LOWKV -fa 1 -p 512 -n 32 \
            -d 0,8192 -r 2 2>/dev/null
    done
    unset LD_LIBRARY_PATH GGML_BACKEND_PATH
fi
if [[ $parts == *attention* ]]; then
    part "attention beside torch's"
    try timeout 200 python3 gpu_attention.py --tokens 4096,32768 --repetitions 10 --json "$out/attention.json"
fi
if [[ $parts == *decode* ]]; then
    part "a model's decoding beside transformers' own cache"
    try timeout 120 python3 gpu_decode.py --layers 12 --steps 8 --rounds 3 --json "$out/decode.json"
fi
if [[ $parts == *sanitizer* ]]; then
    for tool in memcheck racecheck; do
        part "compute-sanitizer $tool"
        LOWKV_TEST_SAMPLE=41 try timeout 120 compute-sanitizer --error-exitcode 1 --tool "$tool" ./test_gpu_attention
    done
fi
if [[ $parts == *counts* ]]; then
    part "warp instructions for 16 tokens of a kv head: the difference of two lengths"
    executed() { # scheme, cells
        timeout 60 ncu -k regex:tensor_[a-km-z0-9]\|tensor_lowkv --launch-skip 1 --launch-count 1 \
            --metrics smsp__inst_executed.sum ./cuda_attention "$1" 128 32 8 "$2" 1 2 device 2>/dev/null |
            sed -n 's/.*smsp__inst_executed.sum *inst *//p' | tr -d ,
    }
    for scheme in lowkv2.8 kivi2 kivi4 turboquant4; do
        few=$(executed $scheme 65536) many=$(executed $scheme 131072)
        if [[ -z $few || -z $many ]]; then
            failed=1
            echo "$scheme: not counted"
        else
            echo "$scheme: $(((many - few) / (65536 * 8 / 16)))"
        fi
    done
fi
part "done"
exit $failed
