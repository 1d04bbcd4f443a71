"""Whether a job's image can be pulled, asked of its registry without a login.

A registry that wants one, or that this machine does not reach, is told as not checked: nodes pull with rights of
their own.
"""

import re
from collections.abc import Iterator
from urllib.parse import urlencode

import certifi
import urllib3

from crosstrain.components import images
from crosstrain.components.core.findings import Finding, error, not_checked, warning
from crosstrain.components.core.launch.own_job import own_image
from crosstrain.components.preflight.work import Training

SECONDS = 4.0
ACCEPT = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in ("oci.image.index.v1", "oci.image.manifest.v1", "docker.distribution.manifest.list.v2",
                 "docker.distribution.manifest.v2")
)  # fmt: skip
_REFERENCE = re.compile(r"(?P<host>[^/]+)/(?P<name>[^@:]+)(?::(?P<tag>[\w.-]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?")
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


def check_images(found: list[Training]) -> Iterator[Finding]:
    """The images of jobs on a cluster, each once."""
    names: dict[str, str] = {}
    for training in found:
        if training.on_cluster:
            own = own_image(training.run_on, images.GPU)
            names.setdefault(training.run_on.image or own, training.component)
    for image, component in names.items():
        yield from check_image(image, f"{component} image {image}")


def check_image(image: str, where: str) -> Iterator[Finding]:
    """One image: named with a registry and a digest, and there."""
    parts = _REFERENCE.fullmatch(image)
    if parts is None or not ("." in parts["host"] or ":" in parts["host"] or parts["host"] == "localhost"):
        yield error(where, "names no registry", "publish the images and record them: python images/lock.py publish")
        return
    if not parts["digest"]:
        yield warning(where, "by tag, not by digest: a retried job may run another image", "name its sha256 digest")
    insecure = parts["host"].split(":")[0] in ("localhost", "127.0.0.1")
    address = f"{'http' if insecure else 'https'}://{parts['host']}/v2/{parts['name']}/manifests/"
    address += parts["digest"] or parts["tag"] or "latest"
    try:
        status = _ask(address)
    except urllib3.exceptions.HTTPError as fault:
        reason = " ".join(str(fault.__cause__ or fault).split())
        yield not_checked(where, f"its registry is not reached from here ({type(fault).__name__}: {reason[:120]})")
        return
    if status == 404:
        yield error(where, "its registry does not have it", "push it, or correct the name")
    elif status != 200:
        yield not_checked(where, f"its registry answers with status {status} without a login")


def _ask(address: str) -> int:
    """HTTP status of a manifest, with an anonymous token where the registry gives one."""
    headers = {"Accept": ACCEPT}
    with urllib3.PoolManager(ca_certs=certifi.where(), retries=False, timeout=urllib3.Timeout(SECONDS)) as pool:
        answer = pool.request("HEAD", address, headers=headers)
        wanted = answer.headers.get("WWW-Authenticate", "")
        challenge = dict(_CHALLENGE.findall(wanted))
        if answer.status != 401 or not wanted.lower().startswith("bearer ") or "realm" not in challenge:
            return answer.status
        query = urlencode({key: challenge[key] for key in ("service", "scope") if key in challenge})
        granted = pool.request("GET", f"{challenge['realm']}?{query}")
        if granted.status != 200:
            return answer.status
        body = granted.json()
        token = body.get("token") or body.get("access_token", "")
        return pool.request("HEAD", address, headers={**headers, "Authorization": f"Bearer {token}"}).status
