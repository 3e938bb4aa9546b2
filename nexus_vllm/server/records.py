"""What happened to recent requests, found by the id that the client knows."""

import re
from collections import deque
from collections.abc import Mapping
from typing import Any

# vLLM's engine-side id is [<child>_]<id>[-<prompt>|_<turn>]-<8 random hex digits>
_ENGINE_ID = re.compile(r"(?P<child>[0-9]+_)?(?P<id>.+?)(?P<salt>-[0-9a-f]{8})?")
_PART = re.compile(r"[-_][0-9]+")


class Records:
    """The newest `capacity` records, one per finished sequence."""

    def __init__(self, capacity: int) -> None:
        self._kept: deque[tuple[str, Mapping[str, Any]]] = deque(maxlen=capacity)

    def resize(self, capacity: int) -> None:
        self._kept = deque(self._kept, maxlen=capacity)

    def add(self, record: Mapping[str, Any]) -> None:
        self._kept.append((_without_salt(record["request_id"]), record))

    def find(self, request_id: str) -> list[Mapping[str, Any]]:
        """Records of the response `request_id`, oldest first.

        One response may be several sequences: n > 1, several prompts, several turns.
        """
        return [record for known, record in self._kept if _belongs(known, request_id)]

    def __len__(self) -> int:
        return len(self._kept)


def _without_salt(engine_id: str) -> str:
    match = _ENGINE_ID.fullmatch(engine_id)
    return engine_id if match is None else (match["child"] or "") + match["id"]


def _belongs(known: str, request_id: str) -> bool:
    child, _, bare = known.partition("_")
    return any(
        name == request_id
        or (name.startswith(request_id) and _PART.fullmatch(name, len(request_id)) is not None)
        for name in ((known, bare) if child.isdecimal() and child.isascii() else (known,))
    )


recent = Records(1024)
"""This process's records. With several API servers each process has its own."""
