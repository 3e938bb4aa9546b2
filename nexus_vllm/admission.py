"""Whether and how a request fits a pool: pure arithmetic, shared by front end and scheduler."""

from dataclasses import replace

from nexus_vllm.config import Directive, DirectiveError, Settings
from nexus_vllm.plan import EvictionPlan
from nexus_vllm.replay import ROOM


def plans(
    directive: Directive,
    prompt_tokens: int,
    max_tokens: int,
    settings: Settings,
    pages: int,
    scores_prompt: bool = False,
) -> list[EvictionPlan]:
    """The plans under which a request alone in a pool of `pages` gets to its end, best first.

    One shot before streaming where the request leaves the choice to the server; none for a request
    that is never evicted. A request that wants logprobs of its prompt (`scores_prompt`) has only
    plans that evict nothing before the prompt's end. Raises DirectiveError where there is no plan.
    """
    settings, size = settings.of(directive.policy), settings.block_size
    budget = directive.budget_blocks(prompt_tokens, settings)
    if budget is None:
        if prompt_tokens >= pages * size:
            raise DirectiveError(
                "kv_budget",
                str(directive.budget),
                f"a prompt of {prompt_tokens} tokens needs all of its KV, the pool holds "
                f"{pages * size} tokens",
                "Give it a budget, such as 20%, or shorten the prompt.",
            )
        return []
    tokens = prompt_tokens + max_tokens
    modes = {"oneshot": (False,), "streaming": (True,), "auto": (False, True)}
    found = {
        streaming: fitting
        for streaming in (False, True)
        if (fitting := _fitting(_plan(prompt_tokens, budget, settings, streaming), tokens, pages))
    }
    whole = {
        streaming: plan
        for streaming, plan in found.items()
        if not scores_prompt or plan.next_eviction(0) >= prompt_tokens
    }
    wanted = [whole[streaming] for streaming in modes[directive.prefill] if streaming in whole]
    if wanted:
        return wanted
    if whole and scores_prompt and directive.prefill == "streaming":
        raise DirectiveError(
            "kv_prefill",
            directive.prefill,
            f"prompt_logprobs must see the whole prompt, and of its {prompt_tokens} tokens "
            f"{budget * size} may stay while it comes in",
            "Use oneshot or auto, or drop prompt_logprobs (echo with logprobs asks for them, too).",
        )
    if found and scores_prompt:
        raise DirectiveError(
            "kv_prefill",
            directive.prefill,
            f"prompt_logprobs must see the whole prompt, and {prompt_tokens} tokens at once do not "
            f"fit the pool of {pages * size} tokens",
            "Shorten the prompt, or drop prompt_logprobs (echo with logprobs asks for them, too).",
        )
    if found:
        raise DirectiveError(
            "kv_prefill",
            directive.prefill,
            f"a prompt of {prompt_tokens} tokens at once does not fit the pool of "
            f"{pages * size} tokens",
            "Use streaming or auto, or shorten the prompt.",
        )
    raise DirectiveError(
        "kv_budget",
        str(directive.budget),
        f"it is {budget * size} tokens for this prompt, and the pool of {pages * size} tokens "
        f"carries {max(0, pages - 2) * size} at most",
        "Use a smaller budget.",
    )


def evicts(found: list[EvictionPlan], tokens: int, session: bool) -> bool:
    """Whether a sequence of so many tokens may meet an eviction under these plans.

    Its last token is sampled, but never computed. Of a session nobody knows the end.
    """
    return bool(found) and (session or any(plan.next_eviction(0) < tokens - 1 for plan in found))


def check_replay(
    policy: str,
    prompt_tokens: int,
    longest: int,
    *,
    session: bool,
    words: bool,
    caching: bool,
    tokenizer: bool,
) -> None:
    """Raise DirectiveError unless a policy that looks at a replay can have one.

    longest: as `replay.longest_replay`. session: whether the request is a streaming-input session.
    words: whether its prompt is nothing but tokens. caching, tokenizer: whether the engine has a
    prefix cache, and a tokenizer.
    """
    limit, remedy = "", "Ask for another policy, such as nexus."
    if session:
        limit = "a session's next prompt has not been replayed when it comes"
    elif not words:
        limit = "only tokens can be repeated, and this prompt has images or embeddings"
    elif not caching:
        limit = "a replay finds the prompt in the prefix cache, which is off"
        remedy = "Serve without --no-enable-prefix-caching, or ask for another policy."
    elif not tokenizer:
        limit = "the instruction of a replay needs a tokenizer"
        remedy = "Serve without --skip-tokenizer-init, or ask for another policy."
    elif prompt_tokens + ROOM > longest:
        limit = (
            f"a replay of {prompt_tokens} tokens needs room for {ROOM} more, and pool and "
            f"max_model_len allow {longest} in all"
        )
        remedy = "Shorten the prompt, or ask for another policy."
    if limit:
        raise DirectiveError("kv_policy", policy, limit, remedy)


def largest_plan(prompt_tokens: int, settings: Settings, pages: int) -> EvictionPlan:
    """The plan with the largest budget that a pool of `pages` always carries."""
    plan = _plan(prompt_tokens, max(1, pages - 2), settings, streaming=True)
    return replace(plan, interval=1, chunk=1)


def draft_pages(drafts: int, block_size: int) -> int:
    """Pages that a sequence may take for so many drafts, beyond those of its plan."""
    return -(-drafts // block_size)


def carried_pages(pages: int, drafts: int, block_size: int, max_model_len: int) -> int:
    """Pages of a pool that one sequence can fill: vLLM proposes no drafts beyond max_model_len."""
    whole = -(-max_model_len // block_size)
    return pages if pages >= whole else pages - draft_pages(drafts, block_size)


def most_pages(settings: Settings, max_model_len: int, drafts: int = 0) -> int:
    """The most pages that a sequence of any length holds under the engine's own budget.

    `drafts`: tokens that may be proposed at a time, by speculative decoding.
    """
    budget = settings.directive(None).budget_blocks(max_model_len, settings)
    whole = -(-max_model_len // settings.block_size)
    if budget is None or settings.prefill == "oneshot":
        return whole
    plan = _plan(max_model_len, budget, settings, streaming=True)
    more = draft_pages(drafts, settings.block_size)
    return min(whole, plan.most_blocks(max_model_len) + more)


def least_pages(settings: Settings, max_model_len: int, drafts: int = 0) -> int:
    """As `most_pages`, where a tight pool makes it grow by single blocks (see `plans`)."""
    budget = settings.directive(None).budget_blocks(max_model_len, settings)
    most = most_pages(settings, max_model_len, drafts)
    least = draft_pages(drafts, settings.block_size) + 2
    return most if budget is None else min(most, budget + least)


def _plan(prompt: int, budget: int, settings: Settings, streaming: bool) -> EvictionPlan:
    size = settings.block_size
    return EvictionPlan(
        prompt_tokens=prompt,
        budget=budget,
        interval=settings.interval_blocks(budget),
        chunk=settings.chunk // size,
        block_size=size,
        streaming=streaming,
    )


def _fitting(plan: EvictionPlan, tokens: int, pages: int) -> EvictionPlan | None:
    """The plan if it fits, or else with smaller steps; None where its budget is too large."""
    if plan.most_blocks(tokens) <= pages:
        return plan
    room = pages - plan.budget - 1
    if room < 1:
        return None
    plan = replace(plan, interval=min(plan.interval, room), chunk=min(plan.chunk, room))
    return plan if plan.most_blocks(tokens) <= pages else None
