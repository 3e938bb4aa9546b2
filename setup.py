"""Only what pyproject.toml cannot say: found packages and mapped ones together."""

from pathlib import Path

from setuptools import find_packages, setup

# Top-level folders installed inside the package. `kernels` in particular must never be importable
# as a top-level module: that name belongs to another distribution, which transformers probes for.
MAPPED = {"nexus_vllm.configs": "configs", "nexus_vllm.kernels": "kernels"}

setup(
    # The package has a link to `kernels`, by which tools that read sources find it.
    packages=sorted(
        {
            *find_packages(include=["nexus_vllm", "nexus_vllm.*"]),
            *(package for package, folder in MAPPED.items() if Path(folder).is_dir()),
        }
    ),
    package_dir=MAPPED,
)
