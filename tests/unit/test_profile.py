"""The profile file: the same profile is the same bytes, and a wrong one says why it is refused."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nexus_vllm import policies
from nexus_vllm.config import Settings, config_folder
from nexus_vllm.profile import ModelFacts, Origin, Profile, average, fitting, rank_correlation

FACTS = ModelFacts("org/Tiny-1M", layers=2, kv_heads=3, head_size=8)
DENSITIES = (0.1, 0.4, 1.0)


def shares_of(seed: int, densities: tuple[float, ...] = DENSITIES, heads: int = 6) -> Tensor:
    """Random shares [K, heads] with the right means, some exactly 0 or 1."""
    draw = torch.rand(heads, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = []
    for density in densities:
        low, high = -2.0, 2.0
        for _ in range(80):  # raise or lower all of them until the mean is right
            middle = (low + high) / 2
            if float((3 * draw - 1 + middle).clamp(0, 1).mean()) < density:
                low = middle
            else:
                high = middle
        rows.append((3 * draw - 1 + high).clamp(0, 1))
    return torch.stack(rows)


def profile(seed: int = 0, **changes: Any) -> Profile:
    made = Profile(
        model=FACTS,
        score="nexus",
        parameters={"lam": 0.5, "walk_steps": 3, "heads": "per-head"},
        block_size=32,
        densities=DENSITIES,
        shares=shares_of(seed).view(3, 2, 3),
        origin=Origin("oracle", (f"book-{seed}",), (seed,), {"nexus-vllm": "0.1.0"}),
    )
    return dataclasses.replace(made, **changes)


@given(seed=st.integers(0, 500), heads=st.integers(1, 30))
def test_saving_is_stable_and_nearly_exact(
    tmp_path_factory: pytest.TempPathFactory, seed: int, heads: int
) -> None:
    densities = (0.01, 0.12347, 1 / 3, 0.5, 0.98765, 1.0)
    made = profile(
        model=dataclasses.replace(FACTS, layers=1, kv_heads=heads),
        densities=densities,
        shares=shares_of(seed, densities, heads).view(6, 1, heads),
    )
    one, two = (tmp_path_factory.mktemp("profiles") / name for name in ("one.json", "two.json"))
    made.save(one)
    loaded = Profile.load(one)
    loaded.save(two)
    assert one.read_bytes() == two.read_bytes()
    assert float((loaded.shares - made.shares).abs().max()) < 2e-4
    means = torch.tensor(densities, dtype=torch.float64)
    torch.testing.assert_close(loaded.shares.mean((1, 2)), means, atol=1e-12, rtol=0)
    for field in ("model", "score", "parameters", "block_size", "densities", "origin"):
        assert getattr(loaded, field) == getattr(made, field)


def test_the_file_is_readable_and_has_no_machine_paths(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    profile(model=dataclasses.replace(FACTS, name="/home/me/models/Tiny-1M/")).save(path)
    text = path.read_text()
    assert "/home" not in text
    data = json.loads(text)
    assert data["model"]["name"] == "Tiny-1M"
    assert data["version"] == 1
    assert sum(data["shares"][1]) == round(0.4 * 6 * 10_000)
    assert len(text.splitlines()) == 7 + 2 + 3


def test_at_is_linear_between_knots() -> None:
    made = profile()
    first, second = made.shares[0], made.shares[1]
    torch.testing.assert_close(made.at(0.25), (first + second) / 2)
    torch.testing.assert_close(made.at(0.05), first / 2)
    assert torch.equal(made.at(0.1), first)
    assert made.at(0.0).tolist() == [[0.0] * 3] * 2
    torch.testing.assert_close(made.at(1.0), torch.ones(2, 3, dtype=torch.float64))
    short = profile(densities=(0.1,), shares=made.shares[:1])
    torch.testing.assert_close(short.at(0.55), (first + 1) / 2)
    assert short.at(1.0).tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"densities": (0.4, 0.1, 1.0)}, "must ascend"),
        ({"densities": (0.0, 0.4, 1.0)}, "must ascend"),
        ({"densities": (0.1, 0.4, 1.1)}, "must ascend"),
        ({"densities": ()}, "must ascend"),
        ({"densities": (0.1, 0.41, 1.0)}, "density 0.41 have mean 0.4"),
        ({"shares": torch.ones(3, 3, 2)}, r"\(3, 3, 2\), expected \(3, 2, 3\)"),
        ({"shares": torch.full((3, 2, 3), 1.1)}, "between 0 and 1"),
        ({"shares": torch.full((3, 2, 3), math.nan)}, "between 0 and 1"),
    ],
)
def test_a_profile_that_contradicts_itself_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        profile(**change)


def check(made: Profile, **changes: Any) -> None:
    given: dict[str, Any] = {
        "model": FACTS,
        "score": "nexus",
        "parameters": dict(made.parameters),
        "block_size": 32,
    }
    made.check(**given | changes)


def test_check_accepts_the_same_model_wherever_it_lies() -> None:
    check(profile())
    for name in (
        "/cache/models/tiny-1m",
        "tiny-1m/",
        "/cache/huggingface/hub/models--org--Tiny-1M/snapshots/0123abcd",
    ):
        check(profile(), model=dataclasses.replace(FACTS, name=name))


def test_a_profile_of_replays_is_good_for_any_score() -> None:
    made = profile(origin=dataclasses.replace(profile().origin, source="replay"))
    check(made, score="streaming-llm", parameters={})
    check(made, parameters={"heads": "mean"})
    with pytest.raises(ValueError, match="block_size"):
        check(made, score="streaming-llm", block_size=16)


def test_a_parameter_that_came_after_a_profile_was_at_its_default() -> None:
    made = profile()
    check(made, parameters={**made.parameters, "pool_rows": "mean", "pool_heads": "mean"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model": ModelFacts("org/Huge", 2, 5, 8)},
            "made for name='Tiny-1M', kv_heads=3, this is name='Huge', kv_heads=5; make one",
        ),
        ({"model": dataclasses.replace(FACTS, head_size=16)}, "head_size=8, this is head_size=16"),
        ({"score": "streaming-llm", "parameters": {}}, "score='nexus', this is score='streaming"),
        ({"block_size": 16}, "block_size=32, this is block_size=16"),
        (
            {"parameters": {"lam": 0.25, "walk_steps": 3, "heads": "per-head"}},
            "nexus lam=0.5, this is nexus lam=0.25; ",
        ),
        (
            {"parameters": {"lam": 0.5, "walk_steps": 3, "pool_rows": "max"}},
            "made for nexus pool_rows='mean', this is nexus pool_rows='max'; ",
        ),
        ({"parameters": {"lam": 0.5, "walk_steps": 3, "lambda": 1}}, "lambda=None, this is .*=1"),
    ],
)
def test_check_names_what_differs_and_the_remedy(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        check(profile(), **change)
    assert "nexus-vllm profile MODEL" in str(error.value)


def test_a_folder_s_fitting_profile_is_found_and_a_broken_one_is_not_passed_over(
    tmp_path: Path,
) -> None:
    made = profile()
    facts = (made.model, made.score, made.parameters, made.block_size)
    assert fitting(tmp_path, *facts) is None
    profile(model=dataclasses.replace(FACTS, name="other")).save(tmp_path / "a.json")
    made.save(tmp_path / "b.json")
    assert fitting(tmp_path, *facts) == tmp_path / "b.json"
    assert fitting(tmp_path, *facts[:3], 16) is None
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match=r"a\.json"):
        fitting(tmp_path, *facts)


@pytest.mark.parametrize("path", sorted((config_folder() / "profiles").glob("*.json")), ids=str)
def test_a_shipped_profile_is_found_for_its_model_under_the_default_settings(path: Path) -> None:
    settings = Settings()
    model = Profile.load(path).model
    assert model.name == path.stem
    parameters = dataclasses.asdict(policies.make("nexus", settings))  # type: ignore[call-overload]
    assert fitting(path.parent, model, "nexus", parameters, settings.block_size) == path


def edited(**changes: Any) -> Any:
    def edit(data: dict[str, Any]) -> dict[str, Any]:
        return data | changes

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (edited(format="other"), "format is 'other'"),
        (edited(version=2), "version is 2, this nexus-vllm reads 1"),
        (lambda data: {k: v for k, v in data.items() if k != "block_size"}, "block_size.*missing"),
        (lambda data: data | {"model": data["model"] | {"layers": 3}}, "fingerprint.*edited"),
        (edited(shares=[[1, 2], [3, 4]]), r"shares are \(2, 2\), expected \(3, 6\)"),
        (edited(shares=[[1, 2], [3]]), "no valid profile"),
        (edited(shares="none"), "no valid profile"),
        (edited(shares=[[1000] * 6, [4000] * 6, [9000] * 6]), "densities as means"),
        (lambda data: [data], "no valid profile"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, edit: Any, message: str) -> None:
    path = tmp_path / "bad.json"
    profile().save(path)
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=f"bad.json.*{message}"):
        Profile.load(path)


def test_what_is_no_json_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text("not json")
    with pytest.raises(ValueError, match=r"bad\.json: no valid profile"):
        Profile.load(path)


def test_average_is_the_mean_and_remembers_all_contexts() -> None:
    mean = average([profile(0), profile(1), profile(1)])
    expected = (profile(0).shares + 2 * profile(1).shares) / 3
    torch.testing.assert_close(mean.shares, expected)
    assert mean.origin.contexts == ("book-0", "book-1")
    assert mean.origin.seeds == (0, 1)
    assert mean.origin.versions == {"nexus-vllm": "0.1.0"}


def test_average_refuses_what_does_not_match() -> None:
    with pytest.raises(ValueError, match="block_size=32, this is block_size=16"):
        average([profile(), profile(block_size=16)])
    with pytest.raises(ValueError, match="densities"):
        average([profile(), profile(densities=(0.1,), shares=profile().shares[:1])])
    with pytest.raises(ValueError, match="no profile"):
        average([])


def with_heads(*shares: float) -> Profile:
    table = torch.tensor(shares, dtype=torch.float64)
    return profile(
        model=ModelFacts("tiny", 1, len(shares), 8),
        densities=(float(table.mean()),),
        shares=table.view(1, 1, -1),
    )


def test_rank_correlation_is_spearman_s() -> None:
    one = with_heads(0.1, 0.2, 0.3, 0.4)
    assert rank_correlation(one, with_heads(0.0, 0.3, 0.31, 0.39), 0.25) == pytest.approx(1)
    assert rank_correlation(one, with_heads(0.4, 0.3, 0.2, 0.1), 0.25) == pytest.approx(-1)
    # Without ties 1 - 6 sum d^2 / (n (n^2 - 1)) = 1 - 6 * 2 / 60.
    assert rank_correlation(one, with_heads(0.1, 0.3, 0.2, 0.4), 0.25) == pytest.approx(0.8)
    # Ranks 1, 2, 3, 4 against 1.5, 1.5, 3, 4: 4.5 / sqrt(5 * 4.5).
    tied = with_heads(0.2, 0.2, 0.25, 0.35)
    assert rank_correlation(one, tied, 0.25) == pytest.approx(math.sqrt(0.9))
    assert math.isnan(rank_correlation(one, one, 1.0))
    with pytest.raises(ValueError, match="heads"):
        rank_correlation(one, profile(), 0.25)
