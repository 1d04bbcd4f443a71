"""A connection to one S3 endpoint: repeats what may heal, renews credentials, and names what will not heal.

The library's client makes and signs each request; its own retries are off, because they repeat a request with
the signature and the credentials of its first try, and cannot see error codes that come with status 400.
Endpoint, region and credentials come from the AWS variables alone.
"""

import functools
import logging
import os
import random
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import certifi
import urllib3
from minio import Minio
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError
from urllib3.exceptions import HTTPError, LocationValueError

from crosstrain.components.core.credentials import CredentialSource, find_credentials

KFP_ENDPOINT = "http://seaweedfs.kubeflow:9000"
"""Where minio:// leads without AWS_ENDPOINT_URL: the store that Kubeflow Pipelines 2.16 and 2.17 install.

Source: DefaultEndpointInMultiUserMode in kubeflow/pipelines, backend/src/v2/objectstore/config.go.
"""
DEFAULT_REGION = "us-east-1"
"""Region that requests to an own endpoint are signed for when none is set; such servers ignore it."""

CONNECT_SECONDS, READ_SECONDS = 10, 60

TRANSIENT = frozenset(
    {"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "Throttling", "ThrottlingException",
     "TooManyRequests", "ConditionalRequestConflict", "OperationAborted", "BadDigest", "IncompleteBody"}
)  # fmt: skip
EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "RequestExpired"})
REFUSED = {
    "InvalidAccessKeyId": "the access key is unknown there",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "AccessDenied": "they do not allow this, or the object is missing and they do not allow to list the bucket",
    "AllAccessDisabled": "all access to the bucket is disabled",
    "AccountProblem": "there is a problem with the account",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    **dict.fromkeys(EXPIRED, "they have expired"),
}

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """How long a request is repeated: whatever ends first of tries and seconds."""

    tries: int = 10
    seconds: float = 180
    first_wait: float = 0.5
    """Upper bound of the first wait in seconds; it doubles with each, and the wait is drawn from [0, bound)."""
    longest_wait: float = 30

    def wait(self, failed: int) -> float:
        """Seconds to wait after this many failed tries."""
        return random.uniform(0, min(self.longest_wait, self.first_wait * 2 ** (failed - 1)))


PATIENCE = Patience()
FIRST_PATIENCE = Patience(tries=5, seconds=30)
"""For an endpoint that has not answered yet: a wrong address should not take minutes to tell."""


class Connection:
    """One endpoint, one source of credentials, a pool of connections; for one process and all its threads."""

    def __init__(self, endpoint: str, region: str | None, credentials: CredentialSource) -> None:
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.hostname or url.path.strip("/") or url.query:
            raise ValueError(f"{endpoint!r} is no S3 endpoint; give AWS_ENDPOINT_URL as http(s)://host[:port]")
        self.endpoint = endpoint
        self.credentials = credentials
        self._answered = False
        pool = urllib3.PoolManager(
            maxsize=32,
            retries=False,
            timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS),
            ca_certs=os.environ.get("AWS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE") or certifi.where(),
        )
        self._client = Minio(
            url.netloc, secure=url.scheme == "https", region=region, credentials=credentials, http_client=pool
        )

    def call(self, uri: str, request: Callable[[Minio], T]) -> T:
        """Make a request until it succeeds, cannot succeed, or patience ends.

        Args:
            uri: What it is about, for errors.
            request: Uses the client; called again for each try.

        Raises:
            FileNotFoundError: there is no such object or bucket.
            PermissionError: the credentials are refused, or have expired and cannot be renewed.
            OSError: anything else.
        """
        started = time.monotonic()
        failed, renewed = 0, False
        while True:
            used = self.credentials.retrieve()
            try:
                result = request(self._client)
            except (MinioException, HTTPError) as error:
                failed += 1
                patience = PATIENCE if self._answered else FIRST_PATIENCE
                if not renewed and _may_be_expired(error):
                    renewed = True
                    if self.credentials.renew(used):
                        continue
                wait = max(patience.wait(failed), min(_retry_after(error), patience.longest_wait))
                spent = time.monotonic() - started
                if not _transient(error) or failed >= patience.tries or spent + wait > patience.seconds:
                    raise self._explain(uri, error, failed, spent) from None
                log.warning("%s: %s; try %d follows in %.1f s", uri, _summary(error), failed + 1, wait)
                time.sleep(wait)
            else:
                self._answered = True
                return result

    def _explain(self, uri: str, error: Exception, tries: int, seconds: float) -> OSError:
        code = _code(error)
        if code == "NoSuchBucket":
            bucket = urlsplit(uri).netloc
            return FileNotFoundError(
                f"{uri}: no bucket {bucket!r} at {self.endpoint}; create it, or correct the URI or AWS_ENDPOINT_URL"
            )
        if code in ("NoSuchKey", "ResourceNotFound"):
            return FileNotFoundError(f"{uri}: no such object")
        if code in REFUSED or _status(error) in (401, 403) or (_may_be_expired(error) and not _transient(error)):
            why = REFUSED.get(code, f"{code}: they may have expired")
            return PermissionError(
                f"{uri}: {self.endpoint} refused the credentials from {self.credentials.name}: {why}; "
                f"{self.credentials.advice}"
            )
        if _is_certificate(error):
            return OSError(
                f"{uri}: the certificate of {self.endpoint} does not verify; name its CA file in AWS_CA_BUNDLE"
            )
        if _transient(error):
            return OSError(
                f"{uri}: {self.endpoint} failed {tries} times in {seconds:.0f} s ({_summary(error)}); check "
                "AWS_ENDPOINT_URL, the network and the server, then run again"
            )
        return OSError(f"{uri}: {self.endpoint} refused the request ({_summary(error)})")


def connect(scheme: str) -> Connection:
    """The process's connection for `s3` or `minio` URIs, as the AWS variables say now.

    Raises:
        PermissionError: no credentials are configured.
        ValueError: the endpoint or the region is malformed.
    """
    variables = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_")))
    return _connect(scheme, variables, os.getpid())


@functools.lru_cache(maxsize=8)
def _connect(scheme: str, variables: tuple[tuple[str, str], ...], process: int) -> Connection:
    given = dict(variables)
    region = given.get("AWS_REGION") or given.get("AWS_DEFAULT_REGION")
    endpoint = given.get("AWS_ENDPOINT_URL_S3") or given.get("AWS_ENDPOINT_URL")
    if not endpoint and scheme == "minio":
        endpoint = KFP_ENDPOINT
    if not endpoint:
        return Connection("https://s3.amazonaws.com", region, find_credentials())
    return Connection(endpoint.rstrip("/"), region or DEFAULT_REGION, find_credentials())


def _code(error: Exception) -> str:
    return (error.code or "") if isinstance(error, S3Error) else ""


def _status(error: Exception) -> int:
    if isinstance(error, S3Error):
        return int(error.response.status)
    if isinstance(error, ServerError):
        return error.status_code
    return int(error._code) if isinstance(error, InvalidResponseError) else 0


def _may_be_expired(error: Exception) -> bool:
    """Whether other credentials could help; the answer to HEAD has no body, and so no code, to tell."""
    bare = isinstance(error, S3Error) and not error.response.data and error.response.status in (400, 403)
    return bare or _code(error) in EXPIRED or _code(error) == "InvalidAccessKeyId"


def _transient(error: Exception) -> bool:
    if isinstance(error, HTTPError):
        return not isinstance(error, LocationValueError) and not _is_certificate(error)
    status = _status(error)
    return _code(error) in TRANSIENT or status in (408, 429) or (status >= 500 and status != 501)


def _is_certificate(error: Exception) -> bool:
    return any(isinstance(cause, ssl.SSLCertVerificationError) for cause in (*error.args, error.__cause__))


def _retry_after(error: Exception) -> float:
    text = error.response.headers.get("Retry-After", "") if isinstance(error, S3Error) else ""
    return float(text) if text.isdecimal() else 0.0


def _summary(error: Exception) -> str:
    if isinstance(error, S3Error):
        return f"status {error.response.status}, {error.code}: {error.message}"
    if isinstance(error, MinioException):
        return f"status {_status(error)}"
    return " ".join(f"{type(error).__name__}: {error}".split())
