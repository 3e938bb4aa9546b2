"""Everything that touches vLLM lives here."""
