"""Names that `import cgx_ray` offers, and the packages that it does not import."""

from __future__ import annotations

import subprocess
import sys

import pytest

import cgx_ray

pytestmark = pytest.mark.long


def test_importing_cgx_ray_imports_neither_ray_nor_torch_and_an_agent_needs_no_torch() -> None:
    code = """
import sys, cgx_ray, cgx_ray.cli
heavy = [name for name in ("ray", "torch", "numpy", "matplotlib") if name in sys.modules]
import cgx_ray.monitors.agent
print(heavy, "ray" in sys.modules, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[] True False"


def test_attach_stays_the_function_whoever_imports_its_module() -> None:
    code = """
import cgx_ray.session.attach, cgx_ray.backend
from cgx_ray.session.attach import attach
from cgx_ray.session.attachment import Attachment
assert cgx_ray.attach is attach and cgx_ray.Attachment is Attachment, cgx_ray.attach
assert {name: getattr(cgx_ray, name) for name in cgx_ray.__all__}["attach"] is attach
assert set(cgx_ray.__all__) <= set(dir(cgx_ray))
try:
    cgx_ray.no_such_name
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "module 'cgx_ray' has no attribute 'no_such_name'"


def test_public_names_are_frozen() -> None:
    assert sorted(cgx_ray.__all__) == [
        "Adaptive", "Attachment", "CGXConfig", "CGXError", "Cgx", "CodecRecord", "CodecSpec", "ConfigError", "Flexible",
        "GroupPlan", "Intra", "Layer", "Option", "Parameter", "Plan", "PlanError", "ReplicaError", "Scheme",
        "SimulatedLink", "StateError", "Static", "TransportError", "WireError", "add_state", "attach",
        "configure_backend", "exclude_layers", "layers_of", "make_plan", "register_codec", "register_model",
    ]  # fmt: skip
