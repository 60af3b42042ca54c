#!/usr/bin/env python3
"""Drift: what a packed cache does to long answers.

    eval/drift.py                                     after `make package`; goes on where it was stopped
    eval/drift.py --answer 500 --schemes lowkv2.8,kivi2
    eval/drift.py --modes forced                      not the answers of each scheme: exact's stand in the CSV already
    eval/drift.py -m gemma.gguf --out build/drift     another model
    eval/drift.py --redraw                            the table again, nothing measured

Eight prompts of 256 tokens of the handbook are gone on with, token by token, through a lowkv cache in transformers,
float32, all eight as one batch:

    greedy    the likeliest token each time, past any end of text
    sampled   at temperature 0.8, each prompt and position with the same random number for all schemes
    forced    the sampled answer of the exact cache is fed: the divergence (KLD, nats) of each prediction from
              the exact cache's, in four quarters of the answer. (Not the greedy one: small models say the same
              over and over in it, which any cache predicts.)

For the first two: after how many tokens an answer first differs from the exact cache's (median), where the first end
of text comes (median; none: past the answer), and which share of its 8-grams stood in it before (mean): a model that
loses its thread repeats itself. Writes OUT/drift.csv, a line for each scheme and mode."""

import json
import statistics
import sys
import time
from pathlib import Path

import paths
from sheet import RECOMMENDED, Sheet, again_with_torch, library, measuring_parser, schemes_of

SCHEMES = ["exact", *RECOMMENDED, "kivi4", "kivi2"]
MODES = ["greedy", "sampled", "forced"]
KEY = ["model", "answer", "scheme", "mode"]
COLUMNS = ["library", "figures"]  # JSON: of each prompt
PROMPTS, PROMPT_TOKENS, TEMPERATURE, GRAM = 8, 256, 0.8, 8


def parser():
    made = measuring_parser(__doc__)
    made.add_argument("-m", "--model", help="a GGUF file; default: the set-up's SmolLM2")
    made.add_argument("--schemes", default=",".join(SCHEMES),
                      help="a scheme's own commas are written +; `exact` comes first")
    made.add_argument("--modes", default=",".join(MODES), help="in this order (default: %(default)s)")
    made.add_argument("--answer", type=int, default=2000, help="tokens (default: %(default)s)")
    made.add_argument("--redraw", action="store_true", help="print the table of what the CSV has")
    return made


# ---- results ----


def repeated(tokens):
    """The share of 8-grams that stood before in the same answer."""
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams)


def differs(tokens, exact):
    """After how many tokens; all of them where they are the same."""
    return next((i for i, (a, b) in enumerate(zip(tokens, exact, strict=True)) if a != b), len(tokens))


def table(sheet):
    parts = []
    for model, answer in dict.fromkeys((row["model"], row["answer"]) for row in sheet.rows.values()):
        found = {(row["scheme"], row["mode"]): json.loads(row["figures"])
                 for row in sheet.select(model=model, answer=answer)}
        lines = [f"{model}, {PROMPTS} answers of {answer} tokens", "",
                 "| scheme | greedy: differs after | end | repeats % | sampled: differs after | end | repeats % "
                 "| forced: mean KLD by quarter | same top-1 % |", "|---" * 9 + "|"]
        for scheme in dict.fromkeys(scheme for scheme, _ in found):
            cells = []
            for mode in ("greedy", "sampled"):
                if figures := found.get((scheme, mode)):
                    after = f"{statistics.median(figures['differs']):.0f}" if scheme != "exact" else "-"
                    end = statistics.median(figures["end"])
                    cells += [after, f"{end:.0f}" if end < int(answer) else "none",
                              f"{100 * statistics.mean(figures['repeats']):.0f}"]
                else:
                    cells += [""] * 3
            if figures := found.get((scheme, "forced")):
                quarters = [statistics.mean(q) for q in zip(*figures["kld"], strict=True)]
                cells += [", ".join(f"{q:.4f}" for q in quarters), f"{100 * statistics.mean(figures['top1']):.1f}"]
            else:
                cells += ["-", "-"]
            lines.append(f"| {scheme} | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


# ---- measuring, in an environment with torch ----


class Writer:
    """A model that goes on with eight prompts through caches of any scheme."""

    def __init__(self, args):
        import torch
        from lowkv import benchmark

        self.torch, self.answer = torch, args.answer
        self.model, tokenizer = benchmark.load(args.model)
        ends = self.model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])
        text = Path(paths.set_up_paths()["LOWKV_HANDBOOK_TEXT"]).read_text(encoding="utf-8")
        ids = tokenizer(text[: 10 * PROMPTS * PROMPT_TOKENS * 4], return_tensors="pt").input_ids[0]
        self.prompts = ids[: 4 * PROMPTS * PROMPT_TOKENS].view(PROMPTS, -1)[:, :PROMPT_TOKENS]
        generator = torch.Generator().manual_seed(1)
        self.chances = torch.rand(self.answer, PROMPTS, 1, generator=generator)

    def steps(self, scheme, choose):
        """Calls choose(i, logits of all prompts) for the i-th token of the answers, which it gives."""
        import lowkv

        torch, begun = self.torch, time.monotonic()
        with torch.inference_mode():
            cache = lowkv.Cache.from_model(self.model, scheme)
            fed = self.prompts
            for i in range(self.answer):
                logits = self.model(fed, past_key_values=cache, logits_to_keep=1).logits[:, -1].float()
                fed = choose(i, logits)[:, None]
                if sys.stderr.isatty() and i % 50 == 49:
                    left = (time.monotonic() - begun) / (i + 1) * (self.answer - i - 1)
                    print(f"\r{scheme}: {i + 1} of {self.answer} tokens, {left:.0f} s left ", end="", file=sys.stderr)

    def written(self, scheme, mode):
        """The answers, a list of tokens each."""
        torch, answers = self.torch, []

        def choose(i, logits):
            token = logits.argmax(-1)
            if mode == "sampled":
                shares = (logits / TEMPERATURE).softmax(-1).cumsum(-1)
                token = (shares < self.chances[i]).sum(-1).clamp(max=shares.shape[-1] - 1)
            answers.append(token)
            return token

        self.steps(scheme, choose)
        return torch.stack(answers, 1).tolist()

    def divergences(self, scheme, answers):
        """Of the scheme's predictions along the answers, and whether the likeliest token is the same. The exact cache
        goes along: its predictions of a whole answer would not fit into memory."""
        import lowkv

        torch, fed = self.torch, self.torch.tensor(answers)
        exact, klds, same = lowkv.Cache.from_model(self.model, "exact"), [], []
        last = [self.prompts]

        def choose(i, logits):
            right = self.model(last[0], past_key_values=exact, logits_to_keep=1).logits[:, -1].float().log_softmax(-1)
            klds.append((right.exp() * (right - logits.log_softmax(-1))).sum(-1))
            same.append(right.argmax(-1) == logits.argmax(-1))
            last[0] = fed[:, i : i + 1]
            return fed[:, i]

        self.steps(scheme, choose)
        quarters = torch.stack(klds, 1).view(PROMPTS, 4, -1).mean(-1)
        return {"kld": quarters.tolist(), "top1": torch.stack(same, 1).float().mean(1).tolist()}


def measure(args, sheet):
    now, writer = library(args.package), Writer(args)
    model = Path(args.model).stem
    schemes = ["exact", *(scheme for scheme in schemes_of(args.schemes) if scheme != "exact")]
    for mode in args.modes.split(","):
        for scheme in schemes:
            measured = sheet.get(model, args.answer, scheme, mode).get("library") == now
            if measured or (scheme, mode) == ("exact", "forced"):
                continue
            begun = time.monotonic()
            exact = json.loads(sheet.get(model, args.answer, "exact", "sampled" if mode == "forced" else mode)
                               .get("figures", "{}")).get("tokens")
            if mode == "forced":
                if not exact:
                    sys.exit(f"{sheet.path} lacks the exact cache's sampled answer: "
                             "--modes sampled,forced writes it first")
                figures = writer.divergences(scheme, exact)
            else:
                answers = writer.written(scheme, mode)
                figures = {"differs": [differs(a, b) for a, b in zip(answers, exact or answers, strict=True)],
                           "end": [next((i for i, token in enumerate(a) if token in writer.ends), args.answer)
                                   for a in answers],
                           "repeats": [repeated(a) for a in answers]}
                if scheme == "exact":
                    figures["tokens"] = answers
            sheet.add(model=model, answer=args.answer, scheme=scheme, mode=mode, library=now,
                      figures=json.dumps(figures))
            print(f"\r{mode}, {scheme}: {time.monotonic() - begun:.0f} s" + " " * 30, file=sys.stderr, flush=True)


def main():
    made = parser()
    args = made.parse_args()
    if args.answer % 4 != 0 or args.answer < GRAM:
        made.error(f"--answer {args.answer}: a multiple of 4, {GRAM} or more")
    if unknown := set(args.modes.split(",")) - set(MODES):
        made.error(f"--modes {', '.join(sorted(unknown))}: {', '.join(MODES)}")
    if not args.redraw and not args.measuring:
        return again_with_torch(args.package)
    args.model = args.model or paths.set_up_paths()["LOWKV_MODEL"]
    sheet = Sheet(args.out / "drift.csv", KEY, COLUMNS)
    if args.measuring:
        measure(args, sheet)
    print(table(sheet))
    return 0


if __name__ == "__main__":
    sys.exit(main())
