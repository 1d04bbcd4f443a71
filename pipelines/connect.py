"""Options of every command that talks to Kubeflow Pipelines, and the connection they make."""

import argparse
import os
import sys
from pathlib import Path

from crosstrain.pipelines import kfp_http
from crosstrain.pipelines.kfp_api import Api

EXISTING_TOKEN_VARIABLE = "KF_PIPELINES_TOKEN"


def open_api(arguments: argparse.Namespace) -> Api:
    """The API that the options, the environment or the cluster name.

    Raises:
        ValueError: no server is named.
    """
    token = arguments.existing_token
    if token == "-":
        token = sys.stdin.readline()
    token = (token or os.environ.get(EXISTING_TOKEN_VARIABLE, "")).strip()
    path = Path(arguments.token_file) if arguments.token_file else None
    return Api(kfp_http.Connection(arguments.host, token, path, arguments.request_timeout), arguments.namespace)
