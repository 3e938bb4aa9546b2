"""A logits processor that makes a request generate the tokens it names, in vLLM's own way:

    vllm serve MODEL --logits-processors nexus_vllm.tools.forcing:Forcing

A request with `vllm_xargs: {"force_tokens": [ids]}` then says these tokens, then what it likes. The
log-probabilities in the reply are still the model's own: vLLM takes them before any processor. So
an answer is scored token by token in the cache that an eviction at the prompt's end has left, which
`prompt_logprobs` cannot do. For model runner V1 (V2 has its own interface).
"""

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

from nexus_vllm.tools.eval_plan import FORCED


class Forcing(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        forced = (params.extra_args or {}).get(FORCED)
        if forced is None:
            return None

        def force(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output) < len(forced):
                chosen = logits[forced[len(output)]].clone()
                logits.fill_(float("-inf"))
                logits[forced[len(output)]] = chosen
            return logits

        return force
