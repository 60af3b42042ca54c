#!/usr/bin/env bash
# make demo: answers from the packed cache, then compares schemes on a real model and a real text.
set -euo pipefail
lowkv=$1 model=$2 text=$3

echo "== An answer about the beginning of a text, streamed from the packed cache"
head -c 2600 "$text" | "$lowkv" generate --model "$model" --chat --temp 0.5 --seed 1 --tokens 100 \
    --file - --prompt "In plain words: how does a draft model make text generation faster?"

echo
echo "== About 2,000 tokens of that text under several schemes, beside llama.cpp's own caches"
"$lowkv" compare --model "$model" --file "$text" --tokens 2048 --schemes exact,lowkv2.8,lowkv2 --stock f16,q4_0
