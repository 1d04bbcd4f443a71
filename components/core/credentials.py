"""Where S3 credentials come from: one source, chosen by the environment, kept fresh, and named in errors.

The first source that the environment configures is the one that counts; when it fails, that is the error.
(A chain that goes on to the next source would end in "no provider worked", or work under another identity.)
Order: access key in the environment, web identity (IRSA), shared credentials file, container credentials
(EKS Pod Identity, ECS), EC2 instance metadata. Tokens and keys are in no message and in no URL. The library's own
providers are not used: they put the web identity token into the query string, which errors and debug logs then
show, cannot read a secret key with a '%', and their chain drops the reason of a failure.

Left out on purpose: SSO, credential_process and role chains of ~/.aws/config.
"""

import configparser
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlencode, urlsplit
from xml.etree import ElementTree

import certifi
import urllib3
from minio.credentials import Credentials, Provider
from urllib3.exceptions import HTTPError

REFRESH_SECONDS = 300
"""Credentials are renewed this long before they expire, or after half their life when that is shorter."""
RETRY_SECONDS = 10
"""How long credentials that still hold are kept when renewing them failed."""
CONTAINER_HOSTS = ("127.0.0.1", "localhost", "::1", "169.254.170.2", "169.254.170.23", "fd00:ec2::23")
"""Hosts that container credentials may come from without TLS: loopback, ECS, EKS Pod Identity."""

INSTANCE_ENDPOINT = "http://169.254.169.254"

log = logging.getLogger(__name__)


class CredentialSource(Provider):
    """Credentials of one source, cached until shortly before they expire; safe to share between threads."""

    def __init__(self, name: str, advice: str, fetch: Callable[[], Credentials]) -> None:
        self.name = name
        """What it is, for messages: `the access key in AWS_ACCESS_KEY_ID`."""
        self.advice = advice
        """What to do when these credentials are refused."""
        self._fetch = fetch
        self._lock = threading.Lock()
        self._current: Credentials | None = None
        self._refresh_at = 0.0

    def retrieve(self) -> Credentials:
        """Credentials that hold now.

        Raises:
            PermissionError: the source gives none.
        """
        with self._lock:
            now = time.time()
            if self._current is not None and now < self._refresh_at:
                return self._current
            try:
                self._current = self._renewed(now)
            except PermissionError as error:
                left = _seconds_left(self._current, now)
                if self._current is None or left <= 0:
                    raise
                log.warning("%s; the present ones hold for %.0f s more", error, left)
                self._refresh_at = now + min(RETRY_SECONDS, left)
            return self._current

    def renew(self, refused: Credentials) -> bool:
        """Fetch again after a server called `refused` expired or unknown; whether there are others now."""
        with self._lock:
            if self._current is None or self._current == refused:
                self._current = self._renewed(time.time())
            return self._current != refused

    def _renewed(self, now: float) -> Credentials:
        try:
            credentials = self._fetch()
        except (LookupError, ValueError, OSError, SyntaxError, configparser.Error, HTTPError) as error:
            raise PermissionError(f"no credentials from {self.name} ({_reason(error)}); {self.advice}") from None
        left = _seconds_left(credentials, now)
        self._refresh_at = now + left - min(REFRESH_SECONDS, left / 2)
        return credentials


def find_credentials() -> CredentialSource:
    """The source of S3 credentials that the environment configures.

    Raises:
        PermissionError: there is none, or one is configured by half.
    """
    environment = os.environ
    for find in (_from_environment, _from_web_identity, _from_file, _from_container, _from_instance):
        if (source := find(environment)) is not None:
            return source
    raise PermissionError(
        "no S3 credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or on EKS give the "
        "pod's service account a role (Pod Identity or IRSA)"
    )


def _from_environment(environment: Mapping[str, str]) -> CredentialSource | None:
    _refuse_half(environment, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    if not environment.get("AWS_ACCESS_KEY_ID"):
        return None

    def fetch() -> Credentials:
        return Credentials(
            environment["AWS_ACCESS_KEY_ID"],
            environment["AWS_SECRET_ACCESS_KEY"],
            environment.get("AWS_SESSION_TOKEN") or None,
        )

    return CredentialSource(
        "AWS_ACCESS_KEY_ID in the environment",
        "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for temporary ones, AWS_SESSION_TOKEN anew",
        fetch,
    )


def _from_web_identity(environment: Mapping[str, str]) -> CredentialSource | None:
    _refuse_half(environment, "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN")
    token_file, role = environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"), environment.get("AWS_ROLE_ARN")
    if not token_file or not role:
        return None
    endpoint = (
        environment.get("AWS_ENDPOINT_URL_STS")
        or environment.get("AWS_ENDPOINT_URL")
        or _sts_endpoint(environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "")
    )
    session = environment.get("AWS_ROLE_SESSION_NAME") or "crosstrain"

    def fetch() -> Credentials:
        form = {
            "Action": "AssumeRoleWithWebIdentity",
            "Version": "2011-06-15",
            "RoleArn": role,
            "RoleSessionName": session,
            "WebIdentityToken": Path(token_file).read_text().strip(),
        }
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        answer = ElementTree.fromstring(_request("POST", endpoint, headers, urlencode(form)))
        found = {
            element.tag.rpartition("}")[2]: element.text or "" for element in answer.iterfind(".//{*}Credentials/*")
        }
        return _temporary(found, token="SessionToken")

    return CredentialSource(
        f"the web identity token in {token_file} for role {role}",
        "check the service account's role annotation, the role's trust policy and its permissions",
        fetch,
    )


def _from_file(environment: Mapping[str, str]) -> CredentialSource | None:
    path = Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials").expanduser()
    profile = environment.get("AWS_PROFILE") or "default"

    def fetch() -> Credentials:
        parser = configparser.RawConfigParser()
        parser.read_string(path.read_text())
        section = parser[profile]
        return Credentials(
            section["aws_access_key_id"], section["aws_secret_access_key"], section.get("aws_session_token") or None
        )

    if not environment.get("AWS_PROFILE"):
        try:
            fetch()
        except (FileNotFoundError, KeyError):
            return None
        except configparser.Error as error:  # its message holds the line, which may be a key
            raise PermissionError(f"{path}: not a credentials file ({type(error).__name__}); correct it") from None
    return CredentialSource(
        f"profile {profile!r} in {path}", "correct the file, or choose another profile with AWS_PROFILE", fetch
    )


def _from_container(environment: Mapping[str, str]) -> CredentialSource | None:
    relative = environment.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    uri = f"http://169.254.170.2{relative}" if relative else environment.get("AWS_CONTAINER_CREDENTIALS_FULL_URI")
    if not uri:
        return None
    target = urlsplit(uri)
    if target.scheme != "https" and target.hostname not in CONTAINER_HOSTS:
        raise PermissionError(
            f"AWS_CONTAINER_CREDENTIALS_FULL_URI names {target.hostname}; without TLS only this machine, ECS and EKS "
            "Pod Identity are asked for credentials"
        )

    def fetch() -> Credentials:
        token_file = environment.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")
        token = Path(token_file).read_text() if token_file else environment.get("AWS_CONTAINER_AUTHORIZATION_TOKEN", "")
        headers = {"Authorization": token.strip()} if token.strip() else {}
        return _temporary(json.loads(_request("GET", uri, headers)), token="Token")

    return CredentialSource(
        f"the container credentials at {target.scheme}://{target.netloc}",
        "check the service account's Pod Identity association and the role's permissions",
        fetch,
    )


def _from_instance(environment: Mapping[str, str]) -> CredentialSource | None:
    if environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return None

    base = environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", INSTANCE_ENDPOINT).rstrip("/") + "/latest/"

    def fetch() -> Credentials:
        seconds = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        token = _request("PUT", base + "api/token", seconds, timeout=1, repeats=2).decode()
        headers = {"X-aws-ec2-metadata-token": token}
        roles = base + "meta-data/iam/security-credentials/"
        role = _request("GET", roles, headers).decode().split()[0]
        return _temporary(json.loads(_request("GET", roles + role, headers)), token="Token")

    return CredentialSource(
        "the EC2 instance metadata",
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the pod or the instance a role",
        fetch,
    )


def _refuse_half(environment: Mapping[str, str], *names: str) -> None:
    missing = [name for name in names if not environment.get(name)]
    if missing and len(missing) < len(names):
        (there,) = set(names) - set(missing)
        raise PermissionError(f"{there} is set and {missing[0]} is not; set both, or neither")


def _sts_endpoint(region: str) -> str:
    if not region:
        return "https://sts.amazonaws.com"
    return f"https://sts.{region}.amazonaws.com" + (".cn" if region.startswith("cn-") else "")


def _temporary(found: Mapping[str, str], token: str) -> Credentials:
    return Credentials(
        found["AccessKeyId"], found["SecretAccessKey"], found[token], datetime.fromisoformat(found["Expiration"])
    )


def _request(
    method: str, url: str, headers: Mapping[str, str], body: str = "", timeout: float = 5, repeats: int = 4
) -> bytes:
    retries = urllib3.Retry(
        repeats, redirect=0, backoff_factor=0.2, backoff_jitter=0.2, allowed_methods=None, raise_on_status=False,
        status_forcelist=(429, 500, 502, 503, 504), respect_retry_after_header=False,
    )  # fmt: skip
    ca_file = os.environ.get("AWS_CA_BUNDLE") or certifi.where()
    with urllib3.PoolManager(retries=retries, timeout=urllib3.Timeout(timeout), ca_certs=ca_file) as pool:
        response = pool.request(method, url, body=body or None, headers=headers)
    if response.status != 200:
        raise OSError(f"HTTP status {response.status}{_fault(response.data)}")
    return response.data


def _fault(body: bytes) -> str:
    """The error code in an AWS answer, XML or JSON: `, ExpiredTokenException`."""
    try:
        code = ElementTree.fromstring(body).findtext(".//{*}Code")
    except ElementTree.ParseError:
        return ""
    return f", {code}" if code else ""


def _reason(error: Exception) -> str:
    """What went wrong, without what the answer or the file held."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    if isinstance(error, OSError | HTTPError):
        return " ".join(str(error).split())
    return "not understood"


def _seconds_left(credentials: Credentials | None, now: float) -> float:
    if credentials is None:
        return 0.0
    if credentials.expiration is None:
        return float("inf")
    return credentials.expiration.replace(tzinfo=UTC).timestamp() - now
