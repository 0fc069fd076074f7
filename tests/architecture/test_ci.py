"""What `.ci/run` does for a person who is not root."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

RUN = Path(__file__).parents[2] / ".ci/run"


def test_no_system_package_is_installed_without_root(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(RUN, tmp_path / ".ci")
    programs = {"id": "echo 1000", "make": "true", "python3": "true", "dirname": 'echo "${1%/*}"'}
    programs |= {"apt-get": "touch installed", "../.ci/install_apptainer": "touch installed"}
    (tmp_path / "bin").mkdir()
    for name, line in programs.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\nPATH=/usr/bin:/bin\n{line}\n")
        path.chmod(0o755)
    bash = str(shutil.which("bash"))
    given = {"PATH": str(tmp_path / "bin")}
    done = subprocess.run([bash, ".ci/run"], cwd=tmp_path, env=given, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "installed").exists()
