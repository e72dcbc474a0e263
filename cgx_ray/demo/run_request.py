"""The demo's request to its driver: one training run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """One training run, as a line of JSON.

    policy          as in CGXConfig; None: plain DDP
    fidelity        of policy "adaptive", as in CGXConfig
    simulated_link  (latency_s, ((step, bit/s), ...)); None on a real network
    """

    name: str
    policy: str | None
    steps: int
    seed: int
    batch_size: int
    storage_path: str
    fidelity: str | None = None
    simulated_link: tuple[float, tuple[tuple[int, float], ...]] | None = None

    @property
    def run_dir(self) -> Path:
        return Path(self.storage_path) / self.name

    def to_json(self) -> str:
        return json.dumps(asdict(self))
