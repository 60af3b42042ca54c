#!/usr/bin/env bash
# make demo: compares schemes on a real model and a real text, then answers from the packed cache.
set -euo pipefail
lowkv=$1 model=$2 text=$3

echo "== One text of about 4,000 tokens under several schemes, beside llama.cpp's own caches"
"$lowkv" compare --model "$model" --file "$text" --schemes exact,lowkv4,lowkv2.8,lowkv2 \
    --stock f16,q4_0

echo
echo "== An answer about the beginning of that text, streamed from the packed cache"
head -c 2600 "$text" | "$lowkv" generate --model "$model" --chat --temp 0.5 --seed 1 --tokens 100 \
    --file - --prompt "In plain words: how does a draft model make text generation faster?"
