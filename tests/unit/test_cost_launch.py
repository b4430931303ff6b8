"""The budget at a launch, as the command applies it; nothing is started here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.cli.app import main

AZURE = {
    "AZURE_SUBSCRIPTION_ID": "00000000-0000-0000-0000-000000000000",
    "AZUREML_RESOURCE_GROUP": "a-group",
    "AZUREML_WORKSPACE": "a-workspace",
}


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """`isthmus launch sdxl-progressive --dry-run` with overrides; returns exit code, stdout, stderr."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name, value in AZURE.items():
        monkeypatch.setenv(name, value)

    def run(*overrides: str, offers: str = "[{backend: azure, region: eastus}]") -> tuple[int, str, str]:
        sets = [word for override in (f"compute.offers={offers}", *overrides) for word in ("--set", override)]
        settings = "backends={azure: {environment: {registered: 'training:3'}, compute: a-cluster, spot_compute: another}}"
        with pytest.raises(SystemExit) as ended:
            main(["launch", "sdxl-progressive", "--dry-run", "--set", settings, *sets])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_a_budget_below_the_lower_end_refuses(launch) -> None:  # type: ignore[no-untyped-def]
    code, _, err = launch("budget.max_usd=10")
    assert code == 3
    assert "budget.max_usd $10.00 cannot be enough: $" in err
    assert "azure eastus on_demand 16 x Standard_ND96amsr_A100_v4" in err
    code, _, err = launch("budget={max_hours: 150}")
    assert code == 3
    assert "budget.max_hours 150 h cannot be enough" in err


def test_a_budget_within_the_interval_warns_and_one_above_says_nothing(launch) -> None:  # type: ignore[no-untyped-def]
    code, _, err = launch("budget.max_usd=145_000")
    assert code == 0
    assert "warning: budget.max_usd $145,000 may not be enough" in err
    code, _, err = launch("budget.max_usd=1_000_000")
    assert code == 0
    assert "budget.max_usd" not in err


def test_an_unpriced_offer_warns_that_nothing_can_be_checked(launch) -> None:  # type: ignore[no-untyped-def]
    code, _, err = launch("budget.max_usd=10", offers="[{backend: azure, region: italynorth}]")
    assert code == 0
    assert "warning: budget.max_usd $10.00 cannot be checked: azure italynorth" in err
    assert "usd_per_hour" in err


def test_an_offer_that_is_too_dear_leads_on_to_the_next_one(launch) -> None:  # type: ignore[no-untyped-def]
    two = "[{backend: azure, region: eastus}, {backend: azure, region: eastus, tier: spot}]"
    code, out, err = launch("budget.max_usd=100_000", offers=two)
    assert code == 0, err
    assert "not azure eastus on-demand: budget.max_usd $100,000 cannot be enough" in err
    assert json.loads(out.split("\n# ")[0])
