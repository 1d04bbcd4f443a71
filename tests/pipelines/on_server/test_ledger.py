"""The ledger alone keeps submitters apart, whatever else they look at before they start a run."""

from pathlib import Path

import pytest

from crosstrain.pipelines.ledger import Ledger

KEY = "0" * 64


@pytest.fixture(params=["folder", "s3"])
def ledgers(request: pytest.FixtureRequest, tmp_path: Path) -> list[Ledger]:
    """Three submitters' views of one ledger."""
    uri = request.getfixturevalue("s3_uri") if request.param == "s3" else str(tmp_path)
    return [Ledger(f"{uri}/ledger", 900) for _ in range(3)]


def test_a_key_is_claimed_once(ledgers: list[Ledger]) -> None:
    first, second, _ = ledgers
    claim = first.claim(KEY, "one", None)
    assert claim is not None and second.claim(KEY, "one", None) is None
    assert second.find(KEY) == claim, "the claim was written over"


def test_a_claim_is_taken_over_once_and_its_former_owner_does_not_submit(ledgers: list[Ledger]) -> None:
    owner, second, third = ledgers
    claim = owner.claim(KEY, "one", None)
    assert claim is not None
    taken = second.claim(KEY, "one", claim)
    assert taken is not None and third.claim(KEY, "one", claim) is None
    assert owner.renew(claim) is None and second.renew(taken) is not None
