"""The `nexus-vllm` command."""
