"""Two loopback servers for the storage tests: a proxy that fails on demand, and a giver of credentials."""

import http.client
import json
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

RELAYED_BYTES = 1 << 16


@contextmanager
def _serving(server: ThreadingHTTPServer) -> Iterator[None]:
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class FlakyProxy(ThreadingHTTPServer):
    """An HTTP proxy before an S3 server; each entry of `faults` spoils one request that `matches`.

    Faults: `("status", number, code)` answers so; `("reset",)` breaks before the server hears of it;
    `("lost",)` lets the server do it and breaks the answer; `("cut", n)` ends after n bytes of the body;
    `None` lets one through.
    """

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _ProxyHandler)
        self.upstream = urlsplit(upstream)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.faults: deque[tuple | None] = deque()
        self.matches: Callable[[str, str], bool] = lambda method, path: True
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.lock = threading.Lock()

    def fault(self, method: str, path: str, headers: dict[str, str]) -> tuple | None:
        """Note a request and take the fault that is due."""
        with self.lock:
            self.seen.append((method, path, headers))
            return self.faults.popleft() if self.faults and self.matches(method, path) else None

    def handle_error(self, request: object, client_address: object) -> None:
        """Broken pipes are what this is for."""


class _ProxyHandler(BaseHTTPRequestHandler):
    server: FlakyProxy

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        fault = self.server.fault(self.command, self.path, headers)
        if fault and fault[0] == "reset":
            return self._break()
        if fault and fault[0] == "status":
            return self._answer(*fault[1:])
        upstream = http.client.HTTPConnection(self.server.upstream.netloc, timeout=10)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(body or None)
            response = upstream.getresponse()
            if fault and fault[0] == "lost":
                response.read()
                return self._break()
            self._relay(response, fault[1] if fault else None)
        except (OSError, http.client.HTTPException):
            self._break()
        finally:
            upstream.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle

    def _relay(self, response: http.client.HTTPResponse, left: int | None) -> None:
        self.send_response_only(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        while block := response.read(RELAYED_BYTES):
            if left is not None and len(block) > left:
                self.wfile.write(block[:left])
                self.close_connection = True  # an orderly end: what was sent arrives
                return
            left = None if left is None else left - len(block)
            self.wfile.write(block)

    def _answer(self, status: int, code: str) -> None:
        data = f"<Error><Code>{code}</Code><Message>as told</Message></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _break(self) -> None:
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        """Nothing on the terminal."""


class CredentialServer(ThreadingHTTPServer):
    """Gives the next of `given` (access key, secret, token, seconds to live) as STS, Pod Identity or IMDS would."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _CredentialHandler)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.given: deque[tuple[str, str, str, float]] = deque()
        self.failures: deque[tuple[int, str]] = deque()
        self.asked: list[dict[str, str]] = []


class _CredentialHandler(BaseHTTPRequestHandler):
    server: CredentialServer

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.server.asked.append({"path": self.path, **{name: values[0] for name, values in form.items()}})
        if self.server.failures:
            status, code = self.server.failures.popleft()
            return self._send(status, f"<ErrorResponse><Error><Code>{code}</Code></Error></ErrorResponse>")
        key, secret, token, expiration = self._next()
        self._send(
            200,
            '<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
            f"<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{key}</AccessKeyId>"
            f"<SecretAccessKey>{secret}</SecretAccessKey><SessionToken>{token}</SessionToken>"
            f"<Expiration>{expiration}</Expiration></Credentials></AssumeRoleWithWebIdentityResult>"
            "</AssumeRoleWithWebIdentityResponse>",
        )

    def do_PUT(self) -> None:
        self.server.asked.append({"path": self.path})
        self._send(200, "metadata-token")

    def do_GET(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.asked.append({"path": self.path, **headers})
        if self.server.failures:
            status, code = self.server.failures.popleft()
            return self._send(status, code)
        if self.path == "/latest/meta-data/iam/security-credentials/":
            return self._send(200, "the-role")
        key, secret, token, expiration = self._next()
        self._send(
            200,
            json.dumps({"AccessKeyId": key, "SecretAccessKey": secret, "Token": token, "Expiration": expiration}),
        )

    def _next(self) -> tuple[str, str, str, str]:
        given = self.server.given
        key, secret, token, seconds = given.popleft() if len(given) > 1 else given[0]
        expiration = datetime.fromtimestamp(time.time(), UTC) + timedelta(seconds=seconds)
        return key, secret, token, expiration.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def _send(self, status: int, text: str) -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def credential_server() -> Iterator[CredentialServer]:
    """A loopback server that gives temporary credentials."""
    server = CredentialServer()
    with _serving(server):
        yield server


@pytest.fixture
def flaky_proxy() -> Iterator[Callable[[str], FlakyProxy]]:
    """A function that starts a failing proxy before an endpoint."""
    servers: list[tuple[FlakyProxy, object]] = []

    def start(upstream: str) -> FlakyProxy:
        proxy = FlakyProxy(upstream)
        context = _serving(proxy)
        context.__enter__()
        servers.append((proxy, context))
        return proxy

    yield start
    for _, context in servers:
        context.__exit__(None, None, None)  # type: ignore[attr-defined]
