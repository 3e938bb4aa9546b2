"""How a prompt is replayed: pure arithmetic, shared by front end, scheduler and policies.

For a policy that looks at a replay, the engine computes requests of its own before the one that
asks: each is the prompt, an instruction to repeat it, and a piece of the prompt.
"""

INSTRUCTION = 32
"""Tokens of the instruction, at most; a longer one is cut."""
OVERLAP = 8
"""Tokens of the piece before that a piece begins with, so that the model knows where it is."""
MIN_PIECE = 32
"""Tokens of a piece that every replay must have room for, its overlap included."""
ROOM = INSTRUCTION + MIN_PIECE
"""Tokens that must fit beside the prompt."""


def longest_replay(pages: int, block_size: int, max_model_len: int) -> int:
    """Tokens that a request of a replay may have, where a sequence can fill so many pages: vLLM
    samples one more."""
    return min(max_model_len, pages * block_size) - 1


def pieces(prompt_tokens: int, instruction: int, piece: int, longest: int) -> list[range]:
    """The positions of the prompt that each request of its replay repeats, all about as many.

    instruction: its tokens. piece: the most to repeat at once. longest: as `longest_replay`.
    None where the prompt is empty, or there is no room for ROOM tokens beside it.
    """
    if prompt_tokens < 1 or prompt_tokens + ROOM > longest:
        return []
    most = min(piece, longest - prompt_tokens - instruction) - OVERLAP
    count = -(-prompt_tokens // most)
    step = -(-prompt_tokens // count)
    return [
        range(max(0, first - OVERLAP), min(prompt_tokens, first + step))
        for first in range(0, prompt_tokens, step)
    ]
