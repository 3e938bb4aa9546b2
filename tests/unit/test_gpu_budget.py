"""docs/gpu.md has the tables that scripts/gpu_budget.py writes, which count what they should."""

from .scripts import script

budget = script("gpu_budget")


def test_the_document_has_the_tables() -> None:
    document = budget.DOCUMENT.read_text()
    assert budget.written(document) == document
    assert document.count(" live tokens | MB read |") == len(budget.LIVE)


def test_every_number_of_the_cache_is_counted_once() -> None:
    """Llama-3.1-8B: 128 KiB of keys and values a token, half of it keys."""
    model, live = budget.Model(), 32768
    parts = budget.costs(model, live)
    assert parts["anchors"].read == 64 * 1024 * live
    assert parts["cosines"].read == 64 * 1024 * live
    assert parts["fill, at most"].read == parts["fill, at most"].written == 128 * 1024 * live / 32
    assert parts["score"].read - 64 * 1024 * live == 32 * 32 * 16 * 128 * 2
    assert budget.step(model, live).read - model.weights == 128 * 1024 * live
