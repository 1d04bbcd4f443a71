"""The data image is built and a component runs in it. It takes minutes: `make image-check`, not `make test`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MISSING = [tool for tool in ("buildah", "debootstrap") if not shutil.which(tool)]
CHECK = ROOT / "images" / "check.py"


def test_the_check_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, CHECK, "--work", tmp_path / "work"],
        env={**os.environ, "PATH": str(tmp_path / "empty")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "buildah and debootstrap not installed: apt-get install" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_the_data_image_builds_and_runs_a_component(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, CHECK], capture_output=True, text=True, cwd=tmp_path)
    assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
    for promise in ("not root's", "no compiler", "carries its SBOM", "as KFP's launcher would", "tokenizes"):
        assert promise in done.stdout
