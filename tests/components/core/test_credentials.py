"""Every source of credentials, against a server that speaks its protocol: expiry, renewal, silence about secrets."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crosstrain.components.core import credentials
from crosstrain.components.core.credentials import find_credentials

SECRETS = ("SECRET-1", "SECRET-2", "SESSION-1", "SESSION-2", "JWT-1", "JWT-2", "POD-1", "POD-2")


@pytest.fixture(autouse=True)
def bare(aws_environment: Callable[[str], None]) -> None:
    """No AWS variable but those that a test sets."""


@pytest.fixture(params=["web identity", "pod identity", "instance"])
def source(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, credential_server: Any
) -> str:
    """Each source that gives temporary credentials, set up against the local server."""
    credential_server.given.append(("KEY-1", "SECRET-1", "SESSION-1", 3600))
    if request.param == "web identity":
        (tmp_path / "token").write_text("JWT-1\n")
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/train")
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", credential_server.endpoint)
    elif request.param == "pod identity":
        (tmp_path / "token").write_text("POD-1\n")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{credential_server.endpoint}/v1/credentials")
    else:
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", credential_server.endpoint)
    return str(request.param)


def test_temporary_credentials_come_through_and_are_kept(source: str, credential_server: Any) -> None:
    found = find_credentials()
    assert source.split()[0] in found.name.replace("container", "pod")
    for _ in range(3):
        given = found.retrieve()
        assert (given.access_key, given.secret_key, given.session_token) == ("KEY-1", "SECRET-1", "SESSION-1")
    expected = {"web identity": 1, "pod identity": 1, "instance": 3}  # the instance asks for a token and a role first
    assert len(credential_server.asked) == expected[source]


def test_they_are_renewed_before_they_expire(source: str, credential_server: Any) -> None:
    credential_server.given.clear()
    credential_server.given.extend([("KEY-1", "SECRET-1", "SESSION-1", 1.0), ("KEY-2", "SECRET-2", "SESSION-2", 3600)])
    found = find_credentials()
    assert found.retrieve().access_key == "KEY-1"
    time.sleep(0.55)  # half of their life
    assert found.retrieve().access_key == "KEY-2"


def test_refused_credentials_are_fetched_anew_once(source: str, credential_server: Any) -> None:
    credential_server.given.append(("KEY-2", "SECRET-2", "SESSION-2", 3600))
    found = find_credentials()
    first = found.retrieve()
    assert found.renew(first)
    assert found.retrieve().access_key == "KEY-2"
    asked = len(credential_server.asked)
    assert found.renew(first)  # another thread was refused with the old ones: nothing to ask again
    assert len(credential_server.asked) == asked


@pytest.mark.parametrize("source", ["web identity", "pod identity"], indirect=True)
def test_a_rotated_token_file_is_read_again(source: str, credential_server: Any, tmp_path: Path) -> None:
    found = find_credentials()
    first = found.retrieve()
    (tmp_path / "token").write_text({"web identity": "JWT-2", "pod identity": "POD-2"}[source])
    found.renew(first)
    field = {"web identity": "WebIdentityToken", "pod identity": "authorization"}[source]
    assert [asked[field] for asked in credential_server.asked] == {
        "web identity": ["JWT-1", "JWT-2"],
        "pod identity": ["POD-1", "POD-2"],
    }[source]


def test_credentials_that_still_hold_outlive_a_failing_server(
    source: str, credential_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    credential_server.given.clear()
    credential_server.given.append(("KEY-1", "SECRET-1", "SESSION-1", 1.5))
    found = find_credentials()
    found.retrieve()
    credential_server.failures.extend([(403, "no")] * 20)
    time.sleep(0.8)
    assert found.retrieve().access_key == "KEY-1"
    assert "hold for" in caplog.text
    time.sleep(0.8)
    with pytest.raises(PermissionError, match=r"no credentials from .*403"):
        found.retrieve()


def test_a_refusal_names_source_and_remedy_and_no_secret(
    source: str, credential_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    credential_server.failures.extend([(400, "ExpiredTokenException")] * 20)
    with pytest.raises(PermissionError, match="no credentials from") as refused:
        find_credentials().retrieve()
    message = str(refused.value)
    if source == "web identity":
        assert "ExpiredTokenException" in message
        assert "role/train" in message
        assert "trust policy" in message
    credential_server.failures.clear()
    find_credentials().retrieve()
    assert "\n" not in message
    assert not [secret for secret in SECRETS if secret in message + caplog.text]


def test_web_identity_sends_what_sts_expects(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, credential_server: Any
) -> None:
    (tmp_path / "token").write_text("JWT-1")
    credential_server.given.append(("KEY-1", "SECRET-1", "SESSION-1", 3600))
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/train")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", credential_server.endpoint)
    find_credentials().retrieve()
    assert credential_server.asked == [
        {
            "path": "/",
            "Action": "AssumeRoleWithWebIdentity",
            "Version": "2011-06-15",
            "RoleArn": "arn:aws:iam::1:role/train",
            "RoleSessionName": "crosstrain",
            "WebIdentityToken": "JWT-1",
        }
    ]


@pytest.mark.parametrize(
    ("region", "endpoint"),
    [
        ("", "https://sts.amazonaws.com"),
        ("eu-west-1", "https://sts.eu-west-1.amazonaws.com"),
        ("cn-north-1", "https://sts.cn-north-1.amazonaws.com.cn"),
    ],
)
def test_sts_is_asked_in_the_region(region: str, endpoint: str) -> None:
    assert credentials._sts_endpoint(region) == endpoint


def test_a_passing_fault_of_the_server_is_repeated(source: str, credential_server: Any) -> None:
    credential_server.failures.extend([(503, "later")] * 2)
    assert find_credentials().retrieve().access_key == "KEY-1"


def _profile(path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    path.write_text(text)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))


FILE = """[default]
aws_access_key_id = KEY-1
aws_secret_access_key = SECRET%1/+
[other]
aws_access_key_id = KEY-2
aws_secret_access_key = SECRET-2
aws_session_token = SESSION-2
[half]
aws_access_key_id = KEY-3
"""


def test_profiles_of_the_shared_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _profile(tmp_path / "credentials", monkeypatch, FILE)
    default = find_credentials()
    assert (default.retrieve().secret_key, default.retrieve().session_token) == ("SECRET%1/+", None)
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert find_credentials().retrieve().session_token == "SESSION-2"
    for profile, fault in (("half", "aws_secret_access_key"), ("none", "'none' is missing")):
        monkeypatch.setenv("AWS_PROFILE", profile)
        with pytest.raises(PermissionError, match=f"profile '{profile}'.*{fault}"):
            find_credentials().retrieve()


def test_a_rotated_shared_file_is_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _profile(tmp_path / "credentials", monkeypatch, FILE)
    found = find_credentials()
    first = found.retrieve()
    assert not found.renew(first)
    _profile(tmp_path / "credentials", monkeypatch, FILE.replace("KEY-1", "KEY-9"))
    assert found.renew(first)
    assert found.retrieve().access_key == "KEY-9"


def test_a_broken_shared_file_is_named_and_not_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _profile(tmp_path / "credentials", monkeypatch, "aws_secret_access_key = SECRET-1\n")
    for profile in ("", "default"):
        monkeypatch.setenv("AWS_PROFILE", profile)
        with pytest.raises(PermissionError, match="credentials") as refused:
            find_credentials().retrieve()
        assert "SECRET-1" not in str(refused.value)


def test_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = []
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    names.append(find_credentials().name)
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://169.254.170.23/v1/credentials")
    names.append(find_credentials().name)
    _profile(tmp_path / "credentials", monkeypatch, FILE)
    names.append(find_credentials().name)
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/token")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn")
    names.append(find_credentials().name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY-1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET-1")
    names.append(find_credentials().name)
    words = ("instance", "container", "profile", "web identity", "AWS_ACCESS_KEY_ID")
    assert [word in name for word, name in zip(words, names, strict=True)] == [True] * 5


def test_no_source_at_all_says_what_to_set() -> None:
    with pytest.raises(PermissionError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"):
        find_credentials()


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
        ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN"),
        ("AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    ],
)
def test_half_a_configuration_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, missing: str) -> None:
    monkeypatch.setenv(name, "x")
    with pytest.raises(PermissionError, match=f"{name} is set and {missing} is not"):
        find_credentials()


def test_tokens_go_to_no_strange_host_in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://example.com/credentials")
    with pytest.raises(PermissionError, match=r"names example\.com"):
        find_credentials()


def test_a_missing_token_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/no/such/token")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn")
    with pytest.raises(PermissionError, match="no credentials from the web identity token in /no/such/token"):
        find_credentials().retrieve()
