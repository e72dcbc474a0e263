"""The journal of a run: one JSON line for each decision, and one for what came of it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class Journal:
    """Appends to `path`. A full disk costs lines, never the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_errors = 0

    def write(self, entry: dict[str, Any]) -> None:
        """Append `entry`. If that fails the line is lost, which is said once and counted."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            if self.num_errors == 0:
                logger.warning("decisions are no longer written to %s: %s; training goes on", self.path, error)
            self.num_errors += 1
