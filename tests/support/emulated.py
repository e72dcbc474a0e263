"""Tests that need an emulated network on this machine."""

from __future__ import annotations

import pytest

from cgx_ray.lab.namespaces import Lab


def needs_lab(*, rates_only: bool = True) -> pytest.MarkDecorator:
    """Skip, and say why, where `Lab` does not run. `rates_only`: latency and loss are not needed."""
    reason = Lab.available(rates_only=rates_only)
    return pytest.mark.skipif(reason is not None, reason=reason or "")
