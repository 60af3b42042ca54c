#!/usr/bin/env bash
# make demo: one long prompt answered from the packed cache, then from llama.cpp's own f16 cache.
set -euo pipefail
lowkv=$1 model=$2 prompt=$3

echo "== A question about 2,700 tokens of text, answered from the packed cache (lowkv2.8)"
tail -n 1 "$prompt"
"$lowkv" generate --model "$model" --temp 0 --tokens 60 --stock f16 --file "$prompt"

cat <<END

That was a small model, SmolLM2-135M ($model). With your own, in this folder:

  export PATH=\$PWD/build/release/bin:\$PATH
  lowkv doctor -m model.gguf                                 # does it work here?
  lowkv run -- llama-server -m model.gguf -c 32768           # stock llama.cpp with a packed cache
  lowkv compare -m model.gguf -f book.txt                    # what each scheme loses and gains on a text
END
