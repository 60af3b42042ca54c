#!/usr/bin/env python3
"""EleutherAI's lm-eval-harness with a packed cache: any of its tasks, one column per scheme.

    python3 deps/setup.py lm-eval                     once
    eval/lm_eval_lowkv.py                             after `make package`: the two tasks of eval/lm_eval_tasks
    eval/lm_eval_lowkv.py --tasks gsm8k --num-fewshot 5 -m HuggingFaceTB/SmolLM2-1.7B-Instruct   with a network
    eval/lm_eval_lowkv.py --tasks longbench_2wikimqa,longbench_trec -m Qwen/Qwen3-4B --limit 50
    eval/lm_eval_lowkv.py --redraw                    the table again, nothing measured

The model is lm-eval's own HFLM, in float32 on the CPU. What it reads goes --chunk tokens at a time through a lowkv
cache, a fresh one for each request:

    generate_until     the prompt, in chunks, and what is generated (GSM8K, LongBench, RULER)
    loglikelihood      context and continuation, in chunks (LAMBADA, HellaSwag, MMLU, perplexities). HFLM itself
                       reads them at once and without a cache: nothing would ever be packed.

A scheme packs what has left its window of newest tokens, with most schemes after 128 to 255 tokens: tasks whose prompts
are shorter measure nothing. Add few-shot examples (--num-fewshot) until they are not.

Writes OUT/lm_eval.csv, a line for each task, metric and scheme; --limit and --num-fewshot are a part of its key."""

import sys
from pathlib import Path

import paths
from sheet import RECOMMENDED, Sheet, again_with_torch, library, measuring_parser, schemes_of

OWN = Path(__file__).parent / "lm_eval_tasks"
KEY = ["model", "task", "fewshot", "limit", "chunk", "scheme", "metric"]
COLUMNS = ["library", "value", "error", "questions"]


def parser():
    made = measuring_parser(__doc__)
    made.add_argument("-m", "--model",
                      help="a GGUF file, a folder, or a name on the hub; default: the set-up's SmolLM2")
    made.add_argument("--tasks", default="handbook_codes,handbook_last_word",
                      help="lm-eval's names (default: %(default)s)")
    made.add_argument("--schemes", default=",".join(["exact", *RECOMMENDED]),
                      help="a scheme's own commas are written +")
    made.add_argument("--num-fewshot", type=int, help="solved examples in the prompt; default: the task's own")
    made.add_argument("--limit", type=int, help="questions of each task; default: all")
    made.add_argument("--chunk", type=int, default=128, help="tokens read at a time (default: %(default)s)")
    made.add_argument("--include-path", type=Path, action="append", default=[OWN], help="more folders of task YAMLs")
    made.add_argument("--redraw", action="store_true", help="print the table of what the CSV has")
    return made


# ---- results ----


def figures(found):
    """{metric: (value, standard error or "")} of lm-eval's results of one task, "acc,none" and "acc_stderr,none"."""
    values = {}
    for name, value in found.items():
        metric, _, filtered = name.partition(",")
        if filtered and not metric.endswith("_stderr") and isinstance(value, int | float):
            error = found.get(f"{metric}_stderr,{filtered}")
            label = metric if filtered == "none" else f"{metric} ({filtered})"
            values[label] = (value, error if isinstance(error, int | float) else "")
    return values


def table(rows):
    """Markdown: a line for each model, task and metric, a column for each scheme."""
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    lines = ["| model, task, metric | questions | " + " | ".join(schemes) + " |", "|---" * (2 + len(schemes)) + "|"]
    of = {}
    for row in rows:
        of.setdefault(tuple(row[k] for k in KEY if k != "scheme"), {})[row["scheme"]] = row
    for (model, task, fewshot, _, _, metric), cells in of.items():
        shots = f", {fewshot} shots" if fewshot else ""
        said = [f"{float(r['value']):.3f}" + (f" ± {float(r['error']):.3f}" if r["error"] else "")
                if (r := cells.get(scheme)) else "" for scheme in schemes]
        lines.append(f"| {model}, {task}{shots}, {metric} | {next(iter(cells.values()))['questions']} | "
                     + " | ".join(said) + " |")
    return "\n".join(lines)


# ---- measuring, in an environment with torch and lm-eval ----


def packed_model(source, chunk):
    """lm-eval's HFLM with a lowkv cache. Its `scheme` may be changed between tasks."""
    import lowkv
    import torch
    from lm_eval.models.huggingface import HFLM
    from lowkv import benchmark

    class Packed(HFLM):
        scheme = "exact"

        def _model_call(self, inps, attn_mask=None, labels=None):
            cache = lowkv.Cache.from_model(self.model, self.scheme)
            with torch.inference_mode():
                return torch.cat([self.model(part, past_key_values=cache).logits
                                  for part in inps.split(chunk, dim=1)], dim=1)

        def _model_generate(self, context, max_length, stop, **generation):
            cache = lowkv.Cache.from_model(self.model, self.scheme)
            return super()._model_generate(context, max_length, stop, past_key_values=cache,
                                           prefill_chunk_size=chunk, **generation)

    model, tokenizer = benchmark.load(source)
    return Packed(pretrained=model, tokenizer=tokenizer, batch_size=1)


def measure(args, sheet):
    import lm_eval
    from lm_eval.tasks import TaskManager

    now, name = library(args.package), Path(args.model).stem
    key = {"model": name, "fewshot": "" if args.num_fewshot is None else args.num_fewshot, "limit": args.limit or "",
           "chunk": args.chunk}
    manager, model = TaskManager(include_path=[str(path) for path in args.include_path]), None
    for task in args.tasks.split(","):
        for scheme in schemes_of(args.schemes):
            if any(row["library"] == now for row in sheet.select(task=task, scheme=scheme, **key)):
                continue
            print(f"{task}, {scheme}", file=sys.stderr, flush=True)
            model = model or packed_model(args.model, args.chunk)
            model.scheme = scheme
            done = lm_eval.simple_evaluate(model=model, tasks=[task], num_fewshot=args.num_fewshot, limit=args.limit,
                                           task_manager=manager)
            for part, found in done["results"].items():  # a group of tasks has several
                for metric, (value, error) in figures(found).items():
                    sheet.add(task=part, metric=metric, scheme=scheme, library=now, value=value, error=error,
                              questions=done["n-samples"].get(part, {}).get("effective", ""), **key)


def main():
    args = parser().parse_args()
    if not args.redraw and not args.measuring:
        return again_with_torch(args.package, "LOWKV_LM_EVAL")
    args.model = args.model or paths.set_up_paths()["LOWKV_MODEL"]
    sheet = Sheet(args.out / "lm_eval.csv", KEY, COLUMNS)
    if args.measuring:
        measure(args, sheet)
    print(table(list(sheet.rows.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
