"""HTTP to a Kubeflow Pipelines API server: where it is, who asks, and each bad answer as one line.

Thin on purpose. `kfp.Client` takes seconds to import and rewrites a context file in the home folder; the generated
`kfp_server_api` reads a login page as an empty object, ignores fractional time-outs and turns a TLS failure into an
AttributeError. Every request made here is held to the server's own OpenAPI document by tests. Left out: retries,
because a repeated POST may create a second run; whoever calls decides.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import urllib3

ENDPOINT_VARIABLE = "KF_PIPELINES_ENDPOINT"
TOKEN_PATH_VARIABLE = "KF_PIPELINES_SA_TOKEN_PATH"
TOKEN_PATH = Path("/var/run/secrets/kubeflow/pipelines/token")
"""Where Kubeflow's PodDefault projects the token of audience pipelines.kubeflow.org."""
IN_CLUSTER_HOST = "http://ml-pipeline.kubeflow.svc.cluster.local:8888"
TRY_AGAIN = 75
"""Exit status EX_TEMPFAIL: the same command may succeed later."""
TIMEOUT_SECONDS = 60.0
_API = "/apis/v2beta1"
_PAGE_SIZE = "100"
_MESSAGE_CHARACTERS = 300

_ADVICE = {
    400: "the server finds the request wrong",
    401: "no valid token: set KF_PIPELINES_SA_TOKEN_PATH to a projected token of audience pipelines.kubeflow.org, "
    "or give --existing-token",
    403: "this identity may not do that: check the Role on pipelines.kubeflow.org in the namespace, and --namespace",
    404: "there is no such thing, or --host is not a Kubeflow Pipelines 2 API server",
    409: "it exists already, made by somebody else in this moment",
    429: "the server is busy",
}
_RETRYABLE = (409, 429)


class ApiError(OSError):
    """The server refused, failed or did not answer; the message is one line."""

    def __init__(self, message: str, status: int = 0, retry: bool = False) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status; 0: no answer."""
        self.retry = retry
        """The same request may succeed later."""

    @property
    def exit_status(self) -> int:
        return TRY_AGAIN if self.retry else 2

    @property
    def refused(self) -> bool:
        """The server said no, so that what was asked for was certainly not done."""
        return 400 <= self.status < 500


class Connection:
    """An API server and an identity.

    Args:
        host: Address of the server or of Kubeflow's gateway; empty: the environment's, or the cluster's own.
        token: A bearer token as it is.
        token_path: File with a token that is renewed by others, read again for each request.
        timeout: Seconds to connect, and to wait for each answer.

    Raises:
        ValueError: there is no host, or it is no address.
    """

    def __init__(
        self, host: str = "", token: str = "", token_path: Path | None = None, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        self.host = _address(host)
        self._token = token
        self._token_path = token_path or _projected_token()
        self._timeout = timeout
        self._pool = urllib3.PoolManager(timeout=urllib3.Timeout(connect=timeout, read=timeout), retries=False)

    def get(self, path: str, **query: str) -> dict[str, Any]:
        """One object; see `_call` for errors."""
        return self._call("GET", path, query)

    def post(self, path: str, body: Mapping[str, Any] | None = None, **query: str) -> dict[str, Any]:
        """Make or change something, once."""
        if body is None:
            return self._call("POST", path, query)
        encoded = json.dumps(body, allow_nan=False).encode()
        return self._call("POST", path, query, body=encoded, headers={"Content-Type": "application/json"})

    def upload(self, path: str, file_name: str, data: bytes, /, **query: str) -> dict[str, Any]:
        """Post a file as the form field `uploadfile`."""
        return self._call("POST", path, query, fields={"uploadfile": (file_name, data, "application/yaml")})

    def pages(self, path: str, member: str, **query: str) -> Iterator[dict[str, Any]]:
        """Every item of a list, over all its pages."""
        token = ""
        while True:
            asked = {**query, "page_size": _PAGE_SIZE, **({"page_token": token} if token else {})}
            page = self._call("GET", path, asked)
            yield from page.get(member) or ()
            token = page.get("next_page_token") or ""
            if not token:
                return

    def _call(self, method: str, path: str, query: Mapping[str, str], **given: Any) -> dict[str, Any]:
        """Ask once.

        Raises:
            ApiError: any answer that is not 2xx with a JSON object, or none in time.
        """
        asked = {name: value for name, value in query.items() if value}
        url = f"{self.host}{_API}{path}" + (f"?{urlencode(asked)}" if asked else "")
        what = f"{method} {self.host}{_API}{path}"
        headers = {"Accept": "application/json", **given.pop("headers", {}), **self._authorization()}
        try:
            answer = self._pool.request(method, url, headers=headers, redirect=False, **given)
        except urllib3.exceptions.NewConnectionError as error:  # before its base class, ConnectTimeoutError
            raise ApiError(f"{what}: {_line(str(error))}; is --host right and reachable?", retry=True) from None
        except (urllib3.exceptions.ReadTimeoutError, urllib3.exceptions.ConnectTimeoutError):
            raise ApiError(f"{what}: no answer in {self._timeout:g} s; try again", retry=True) from None
        except urllib3.exceptions.SSLError as error:
            raise ApiError(f"{what}: {_line(str(error))}; is the certificate the host's own?") from None
        except urllib3.exceptions.HTTPError as error:
            raise ApiError(f"{what}: {_line(str(error))}; is --host right and reachable?", retry=True) from None
        if not 200 <= answer.status <= 299:
            raise _refusal(what, answer)
        try:
            found = json.loads(answer.data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ApiError(f"{what}: answered with something that is not the API's JSON (a login page?); check --host")
        return found

    def _authorization(self) -> dict[str, str]:
        token = self._token
        if not token and self._token_path is not None:
            try:
                token = self._token_path.read_text(encoding="utf-8").strip()
            except OSError as error:
                raise ApiError(f"{self._token_path}: cannot read the token: {error.strerror}") from None
        return {"Authorization": f"Bearer {token}"} if token else {}


def segment(text: str) -> str:
    """Text as one segment of a path."""
    return quote(text, safe="")


def _address(given: str) -> str:
    host = given or os.environ.get(ENDPOINT_VARIABLE, "")
    if not host:
        if "KUBERNETES_SERVICE_HOST" not in os.environ:
            raise ValueError(
                f"no Kubeflow Pipelines server: give --host, set {ENDPOINT_VARIABLE}, or run inside the cluster "
                "(kubectl port-forward -n kubeflow svc/ml-pipeline 8888:8888, then --host http://localhost:8888)"
            )
        host = IN_CLUSTER_HOST
    if "://" not in host:
        host = f"https://{host}"
    if urllib3.util.parse_url(host).scheme not in ("http", "https"):
        raise ValueError(f"{host}: expected the address of a server, such as https://kubeflow.example.com/pipeline")
    return host.rstrip("/")


def _projected_token() -> Path | None:
    named = os.environ.get(TOKEN_PATH_VARIABLE, "")
    return Path(named) if named else TOKEN_PATH if TOKEN_PATH.is_file() else None


def _refusal(what: str, answer: urllib3.BaseHTTPResponse) -> ApiError:
    status = answer.status
    if 300 <= status <= 399:
        return ApiError(f"{what}: sent to a login page ({status}); {_ADVICE[401]}", status)
    said = answer.data.decode(errors="replace")
    try:
        parsed = json.loads(said)
        said = str(parsed.get("message") or parsed.get("error_message") or "") if isinstance(parsed, dict) else said
    except ValueError:
        said = "" if said.lstrip().startswith("<") else said
    server = status >= 500
    advice = _ADVICE.get(status, "the server failed; try again" if server else "refused")
    detail = f": {_line(said)}" if said.strip() else ""
    return ApiError(f"{what}: {status}{detail}; {advice}", status, retry=server or status in _RETRYABLE)


def _line(text: str) -> str:
    text = " ".join(text.split()).rstrip(".;")
    return text if len(text) <= _MESSAGE_CHARACTERS else text[:_MESSAGE_CHARACTERS] + "…"
