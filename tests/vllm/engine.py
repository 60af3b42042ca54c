"""One vLLM engine in a process of its own, because a process has one platform for good: reads what to do as JSON,
writes what came of it.

{"engine": {arguments of LLM}, "jobs": [...], "out": file}; a job is one of
  {"generate": [{"ids": [...], "sampling": {...}}, ...]}   all at once; tokens, and log probabilities of the prompt's
  {"abort": [...], "after": steps}                           the same, every other request aborted after so many steps
  {"soak": [...], "together": count, "seed": number}         the same, so many at a time, some aborted at random: how
                                                             many ended and were aborted
  {"forget": true}                                           prefixes that are cached: whether all pages were free
  {"beams": [ids, ...], "width": beams, "tokens": count}     beam search: the beams' tokens, the best first
  {"statistics": true}                                       of lowkv's worker
  {"metrics": [name, ...]}                                   vLLM's own counters
"""

import json
import os
import random
import sys


def asked(request):
    from vllm import SamplingParams, TokensPrompt

    sampling = {"temperature": 0.0, "detokenize": False, "ignore_eos": True} | request["sampling"]
    return TokensPrompt(prompt_token_ids=request["ids"]), SamplingParams(**sampling)


def told(output):
    found = {"ids": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}
    if len(output.outputs) > 1:
        found["all"] = [list(sample.token_ids) for sample in output.outputs]
    if output.outputs[0].logprobs:
        pairs = zip(found["ids"], output.outputs[0].logprobs, strict=True)
        found["answer"] = [by_id[token].logprob for token, by_id in pairs]
    if output.prompt_logprobs:
        pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        found["prompt"] = [by_id[token].logprob for token, by_id in pairs if by_id]
    return found


def aborted(llm, requests, after):
    """Tokens of the requests that were left to end."""
    engine, found = llm.llm_engine, {}
    for number, request in enumerate(requests):
        engine.add_request(str(number), *asked(request))
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id.split("-")[0]] = told(output)
        steps += 1
        if steps == after:
            engine.abort_request([str(number) for number in range(1, len(requests), 2)])
    return [found[str(number)] for number in range(0, len(requests), 2)]


def soaked(llm, job):
    engine, waiting, rng = llm.llm_engine, list(enumerate(job["soak"])), random.Random(job["seed"])
    running, ended, aborts = set(), 0, 0
    while waiting or running:
        while waiting and len(running) < job["together"]:
            number, request = waiting.pop()
            engine.add_request(f"soak{number}", *asked(request))
            running.add(f"soak{number}")
        for output in engine.step():
            if output.finished:
                running.remove(output.request_id.split("-")[0])
                ended += 1
        if running and rng.random() < 0.04:
            chosen = rng.choice(sorted(running))
            engine.abort_request([chosen])
            running.remove(chosen)
            aborts += 1
    return [ended, aborts]


def beams(llm, job):
    from vllm import TokensPrompt
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=job["width"], max_tokens=job["tokens"], ignore_eos=True)
    outputs = llm.beam_search([TokensPrompt(prompt_token_ids=ids) for ids in job["beams"]], params)
    return [[list(sequence.tokens) for sequence in output.sequences] for output in outputs]


def metrics(llm, names):
    found = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return [found[f"vllm:{name}"] for name in names]


def main():
    plan = json.loads(sys.stdin.read())
    from vllm import LLM

    llm = LLM(**plan["engine"])
    results = []
    for job in plan["jobs"]:
        if "generate" in job:
            prompts, sampling = zip(*map(asked, job["generate"]), strict=True)
            results.append([told(output) for output in llm.generate(list(prompts), list(sampling), use_tqdm=False)])
        elif "abort" in job:
            results.append(aborted(llm, job["abort"], job["after"]))
        elif "soak" in job:
            results.append(soaked(llm, job))
        elif "forget" in job:
            results.append(llm.reset_prefix_cache())
        elif "beams" in job:
            results.append(beams(llm, job))
        elif "metrics" in job:
            results.append(metrics(llm, job["metrics"]))
        else:
            results.append(llm.collective_rpc("lowkv_statistics")[0])
    with open(plan["out"], "w") as out:
        json.dump(results, out)
    llm.llm_engine.engine_core.shutdown()
    sys.stdout.flush()
    os._exit(0)  # the engine's threads may hold up an orderly end


if __name__ == "__main__":
    main()
