"""The budget at a launch, as the command applies it; nothing is started here."""

from __future__ import annotations

import json
import re
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

    def run(
        *overrides: str, offers: str = "[{backend: azure, region: eastus}]", options: tuple[str, ...] = ()
    ) -> tuple[int, str, str]:
        sets = [word for override in (f"compute.offers={offers}", *overrides) for word in ("--set", override)]
        settings = "backends={azure: {environment: {registered: 'training:3'}, compute: a-cluster, spot_compute: another}}"
        with pytest.raises(SystemExit) as ended:
            main(["launch", "sdxl-progressive", "--dry-run", "--set", settings, *sets, *options])
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


def test_the_price_of_the_settings_is_the_one_that_the_budget_is_checked_by(launch) -> None:  # type: ignore[no-untyped-def]
    """Nobody lists ml.p4de on SageMaker; the team's own price is what rank 0 keeps the cap by, too."""
    words = (
        "budget.max_usd=10",
        "backends={sagemaker: {role_arn: 'arn:aws:iam::123456789012:role/x', image: 'x/y:1', %s}}",
    )
    places = "[{backend: sagemaker, region: us-east-1, sku: ml.p4de.24xlarge}]"
    own = words[1] % "usd_per_hour: 600"
    code, _, err = launch(words[0], own, offers=places)
    assert code == 3, err
    assert "budget.max_usd $10.00 cannot be enough: $" in err
    assert "on sagemaker us-east-1 on_demand 16 x ml.p4de.24xlarge" in err
    low, high = (float(word.replace(",", "")) for word in re.findall(r"\$([\d,]+)(?= to| are)", err))
    code, _, err = launch("budget.max_usd=10", words[1] % "usd_per_hour: 300", offers=places)
    half = [float(word.replace(",", "")) for word in re.findall(r"\$([\d,]+)(?= to| are)", err)]
    assert half == [pytest.approx(low / 2, rel=0.02), pytest.approx(high / 2, rel=0.02)]
    code, _, err = launch("budget.max_usd=10", words[1] % "region: us-east-1", offers=places)
    assert code == 0, err
    told = "budget.max_usd is $10.00, and the price of an hour of 16 x ml.p4de.24xlarge in us-east-1 is not known"
    assert told in err
    assert "--prices FILE" in err
    assert err.count("budget.max_usd") == 1  # once is enough


def test_a_file_of_prices_at_a_launch(launch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """As for `cost`: over the snapshot, for the price of an hour, the total and the budget; a bad one is refused first."""
    row = "{backend: azure, sku: Standard_ND96amsr_A100_v4, region: italynorth, usd_per_hour: %s}"
    file = tmp_path / "ours.yaml"
    file.write_text(f"prices:\n  - {row % 27.5}\n")
    places = "[{backend: azure, region: italynorth}]"
    code, _, err = launch("budget.max_usd=10", offers=places, options=("--prices", str(file)))
    assert code == 3, err
    assert "budget.max_usd $10.00 cannot be enough: $" in err
    code, out, err = launch(offers=places, options=("--prices", str(file)))
    assert code == 0, err
    assert '"ISTHMUS_USD_PER_HOUR": "440"' in out, "rank 0 keeps the cap by it: 16 x 27.50"
    file.write_text(f"prices:\n  - {row % -1}\n")
    code, _, err = launch(offers=places, options=("--prices", str(file)))
    assert code == 2
    assert "ours.yaml" in err
    code, _, err = launch(offers=places, options=("--prices", str(tmp_path / "nowhere.yaml")))
    assert code == 2
    assert "nowhere.yaml" in err


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


@pytest.mark.usefixtures("no_credentials")
def test_a_doctor_says_of_a_cap_without_a_price_that_once_and_not_that_it_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    offers = "compute.offers=[{backend: sagemaker, region: us-east-1, sku: ml.p4de.24xlarge}]"
    with pytest.raises(SystemExit):
        main(["doctor", "sdxl-progressive", "--backend", "sagemaker", "--set", offers])
    out = capsys.readouterr().out
    assert out.count("[sagemaker.price]") == 1
    assert "[budget" not in out
