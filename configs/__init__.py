"""Shipped presets; installed as `nexus_vllm.configs`."""
