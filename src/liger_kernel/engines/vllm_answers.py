"""Answers of vLLM with the log-probabilities of their tokens, for ``liger bench mismatch``, in a
process of its own: ``vllm_answers.py SPEC RESULT``, both JSON files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def answers(spec: dict[str, Any]) -> dict[str, Any]:
    """Answers of ``new`` tokens to ``prompts``, at most ``batch`` at a time: ids and logp."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=spec["model"],
        dtype=spec["dtype"],
        model_impl=spec["model_impl"],
        skip_tokenizer_init=True,
        seed=0,
        max_model_len=len(spec["prompts"][0]) + spec["new"],
        max_num_seqs=spec["batch"],
        # a cached prompt is computed in other batches than a new one
        enable_prefix_caching=False,
        # without a compiler, under which our kernels would not run
        compilation_config={"mode": 0},
    )
    how = SamplingParams(
        temperature=spec["temperature"],
        max_tokens=spec["new"],
        ignore_eos=True,
        detokenize=False,
        logprobs=0,  # of the sampled token alone
    )
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in spec["prompts"]], how, use_tqdm=False)
    ids, logp = [], []
    for output in outputs:
        answer = output.outputs[0]
        ids.append(list(answer.token_ids))
        logp.append([of_token[token].logprob for token, of_token in zip(answer.token_ids, answer.logprobs)])
    return {"ids": ids, "logp": logp}


def main(spec: str, result: str) -> int:
    Path(result).write_text(json.dumps(answers(json.loads(Path(spec).read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
