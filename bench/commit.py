"""The commit that was measured."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit_of(repository: Path) -> str | None:
    """The checked-out commit, followed by a plus sign if files differ from it; None outside a git checkout."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False
            )
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "--short=12", "HEAD")
    return f"{commit}+" if commit and git("status", "--porcelain") else commit
