#!/usr/bin/env python3
"""Fisher information of a model's keys and values, for `lowkv calibrate --fisher`.

Reads a text with transformers, computes the gradient of the next-token loss with respect to every
key (before its rotary embedding) and every value, and writes the mean of its square per layer and
channel: how much the loss minds an error there. The first token of each window is left out.

    python3 deps/setup.py venv-transformers
    python=$(python3 deps/setup.py --paths |
        python3 -c 'import json,sys; print(json.load(sys.stdin)["LOWKV_TRANSFORMERS_PYTHON"])')
    $python tools/fisher.py -m model.gguf --text book.txt -o fisher.safetensors
    lowkv calibrate -m model.gguf --text book.txt --scheme kvquant2 --fisher fisher.safetensors

The model is a GGUF file of an architecture that transformers knows, or a Hugging Face folder. A
GGUF's keys come in the order that transformers gives them; the file says how RoPE pairs them, and
`lowkv calibrate` puts them in the order of the GGUF.
"""

import argparse
import sys
from pathlib import Path

# Where RoPE turns channels 2i and 2i + 1; elsewhere i and i + half.
NEIGHBOURS = {"cohere", "cohere2", "glm", "glm4", "gptj", "ernie4_5", "helium"}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True, type=Path, help="a GGUF file or a folder")
    parser.add_argument("--text", required=True, type=Path, help="the text to read")
    parser.add_argument("-o", "--output", required=True, type=Path, help="the file to write")
    parser.add_argument("-n", "--tokens", default=4096, type=int, help="tokens of the text")
    parser.add_argument("-c", "--context", default=1024, type=int, help="tokens of a window")
    parser.add_argument("-t", "--threads", type=int, help="threads (default: torch's choice)")
    return parser.parse_args()


def load(path):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    where = {"pretrained_model_name_or_path": path}
    if path.suffix == ".gguf":
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    import torch
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32,
                                                 attn_implementation="eager")
    return model.eval(), AutoTokenizer.from_pretrained(**where)


def parts(model):
    """Per layer, the modules whose outputs are the keys before RoPE and the values."""
    found = []
    for name, module in model.named_modules():
        if hasattr(module, "k_proj") and hasattr(module, "v_proj"):
            found.append((getattr(module, "k_norm", None) or module.k_proj, module.v_proj))
        elif hasattr(module, "qkv_proj") or hasattr(module, "query_key_value"):
            sys.exit(f"fisher.py: {name} computes keys and values in one product, which isn't "
                     "supported; calibrate without --fisher")
    if not found:
        sys.exit("fisher.py: no attention with k_proj and v_proj was found in this model")
    return found


class Gradients:
    """Sums of squared gradients of modules' outputs, per channel."""

    def __init__(self, modules):
        self.sums = [[None, None] for _ in modules]
        self.tokens = 0
        self.outputs = {}
        for layer, pair in enumerate(modules):
            for part, module in enumerate(pair):
                module.register_forward_hook(self.keep(layer, part))

    def keep(self, layer, part):
        def hook(_module, _inputs, output):
            output.retain_grad()
            self.outputs[layer, part] = output
        return hook

    def add(self, tokens):
        for (layer, part), output in self.outputs.items():
            gradient = output.grad.double().reshape(tokens, -1)[1:]
            square = gradient.square().sum(0)
            before = self.sums[layer][part]
            self.sums[layer][part] = square if before is None else before + square
        self.outputs.clear()
        self.tokens += tokens - 1

    def means(self):
        return {f"layers.{layer}.{name}": (pair[part] / self.tokens).float().numpy()
                for layer, pair in enumerate(self.sums)
                for part, name in enumerate(("key", "value"))}


def main():
    args = arguments()
    for path in (args.model, args.text):
        if not path.exists():
            sys.exit(f"fisher.py: there is no {path}")
    if not args.output.parent.is_dir():
        sys.exit(f"fisher.py: there is no folder {args.output.parent}")
    import torch
    from safetensors.numpy import save_file
    if args.threads:
        torch.set_num_threads(args.threads)
    model, tokenizer = load(args.model)
    gradients = Gradients(parts(model))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    tokens = tokenizer(args.text.read_text(), add_special_tokens=False)["input_ids"][:args.tokens]
    context = min(args.context, len(tokens))
    windows = len(tokens) // context if context > 1 else 0
    if windows == 0:
        sys.exit(f"fisher.py: the text {args.text} is too short")
    for window in range(windows):
        ids = torch.tensor([tokens[window * context:(window + 1) * context]])
        inputs = model.get_input_embeddings()(ids).requires_grad_()
        logits = model(inputs_embeds=inputs, use_cache=False).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").backward()
        gradients.add(context)
        print(f"fisher.py: {(window + 1) * context} / {windows * context} tokens", file=sys.stderr)
    pairs = "neighbours" if model.config.model_type in NEIGHBOURS else "halves"
    about = {"format": "lowkv-fisher", "version": "1", "layers": str(len(gradients.sums)),
             "pairs": pairs, "text": args.text.name, "tokens": str(windows * context)}
    draft = args.output.with_name(args.output.name + ".new")
    save_file(gradients.means(), draft, about)
    draft.replace(args.output)
    print(f"fisher.py: written {args.output}", file=sys.stderr)


if __name__ == "__main__":
    main()
