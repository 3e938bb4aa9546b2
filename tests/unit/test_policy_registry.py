"""Policies of other packages, parameters of policies, and the pages that describe both."""

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from nexus_vllm import policies
from nexus_vllm.config import BUILT_IN_POLICIES, ENTRY_POINTS, POLICIES, Settings
from nexus_vllm.engine.compat import wrong_parameters
from nexus_vllm.policies import Observation
from nexus_vllm.policies.nexus import Nexus
from nexus_vllm.policies.snapkv import SnapKV
from nexus_vllm.selectors import SELECTORS

DOCS = Path(__file__).parents[2] / "docs"


def example() -> str:
    """The code of docs/adding-a-policy.md."""
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "adding-a-policy.md").read_text(), re.S)
    return re.sub(r"^   ", "", code, flags=re.M)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `your_package` that can be imported, with the page's policy in it."""
    module = tmp_path / "your_package.py"
    module.write_text(example() + "\n\nclass Plain:\n    name = 'plain'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "your_package", raising=False)
    return module


def point(name: str, value: str = "your_package:Peak") -> EntryPoint:
    return EntryPoint(name, value, ENTRY_POINTS)


def test_the_page_s_policy_registers_and_scores(package: Path) -> None:
    (kind,) = policies.registered([point("peak")]).values()
    obs = Observation(
        queries=torch.randn(2, 3, 4, 8),
        query_positions=torch.arange(17, 20),
        keys=torch.randn(2, 5, 2, 4, 8),
        block_ids=torch.arange(5).expand(2, 5),
        scale=1.0,
        candidates=torch.ones(2, 5, dtype=torch.bool),
        seed=0,
        event=0,
        layers=torch.arange(2),
    )
    maps = policies.block_attention(obs)
    torch.testing.assert_close(kind().weights(obs), maps.max(dim=-2).values.mean(dim=-2))


@pytest.mark.parametrize(
    ("points", "told"),
    [
        ([point("nexus")], "'nexus'.*another policy of this name"),
        ([point("peak"), point("peak")], "'peak'.*another policy of this name"),
        ([point("peaks")], "'peaks'.*calls itself 'peak'"),
        ([point("plain", "your_package:Plain")], "'plain'.*does not derive from"),
        ([point("peak", "your_package:Gone")], "'peak'.*cannot be imported.*Gone"),
        ([point("peak", "no_such_package:Peak")], "cannot be imported.*no_such_package"),
    ],
)
def test_what_cannot_be_registered_is_named(
    package: Path, points: list[EntryPoint], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        policies.registered(points)


def test_names_and_registry_agree() -> None:
    assert tuple(policies.names()) == POLICIES
    assert POLICIES[: len(BUILT_IN_POLICIES)] == BUILT_IN_POLICIES


def test_every_parameter_of_nexus_is_a_setting() -> None:
    assert set(Settings.model_fields) >= {*vars(policies.make("nexus"))}
    assert policies.make("nexus", Settings(prior="keydiff", lam=2)) == Nexus(
        prior="keydiff", lam=2.0
    )


def test_parameters_are_a_policy_s_own_and_of_its_types() -> None:
    settings = Settings(parameters={"snapkv": {"pool": 7, "pooling": "max"}})
    assert wrong_parameters(settings) == []
    assert policies.make("snapkv", settings) == SnapKV(7, "max")
    for own, told in (
        ({"pol": 7}, "no parameter pol; it takes: pool, pooling"),
        ({"pool": 4}, "pool is 4, must be odd"),
        ({"pool": "many"}, "pool is 'many'.*integer"),
        ({"pool": 2.5}, "pool is 2.5.*integer"),
        ({"pool": True}, "pool is True: use a number"),
        ({"pooling": "sum"}, "pooling is 'sum'.*'avg' or 'max'"),
    ):
        ((found, _, remedy),) = wrong_parameters(Settings(parameters={"snapkv": own}))
        assert re.search(told, found), found
        assert "--kv-eviction-config" in remedy
    with pytest.raises(ValueError, match=r"no policy 'snapvk'\. Did you mean 'snapkv'"):
        Settings.from_source({"parameters": {"snapvk": {}}})


def test_the_page_names_every_policy_parameter_and_selector() -> None:
    page = (DOCS / "policies.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` \|(.*)\|$", page, re.M))
    for name in BUILT_IN_POLICIES:
        for parameter in vars(policies.make(name)):
            shown = {"lam": "lambda"}.get(parameter, parameter)
            assert f"`{shown}`" in rows[name], f"{name}: {shown}"
    assert {*BUILT_IN_POLICIES, *SELECTORS} == set(rows) - {"selector"}
