"""Make vLLM do on a CPU what it does by default on a GPU; put this folder first on PYTHONPATH.

It acts before anything imports vLLM, in the process and in all that it spawns (`vllm serve` too),
and only on request: NEXUS_TEST_RUNNER=v2, NEXUS_TEST_ASYNC=1. `harness.shim_environment` sets both.
"""

import os
from importlib import import_module

if os.environ.get("NEXUS_TEST_RUNNER") == "v2":
    import_module("v2_on_cpu").install()

if os.environ.get("NEXUS_TEST_ASYNC") == "1":
    import_module("async_on_cpu").install()

if os.environ.get("NEXUS_TEST_ATTENTION"):
    import_module("attention_on_cpu").install()
