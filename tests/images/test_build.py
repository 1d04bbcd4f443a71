"""Building images takes minutes, so `make image-check` does it, not the tests; here: what it says when it cannot."""

import os
import subprocess
import sys
from pathlib import Path

CHECK = Path(__file__).resolve().parents[2] / "images" / "check.py"


def test_the_check_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, CHECK, "--work", tmp_path / "work"],
        env={**os.environ, "PATH": str(tmp_path / "empty")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "buildah and debootstrap not installed: apt-get install" in done.stderr
