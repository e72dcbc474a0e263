"""Words of `attach` to its user: the same as those of CGXConfig, and what it does where it does nothing."""

from __future__ import annotations

import logging

import pytest
from torch import nn

import cgx_ray
from cgx_ray.logs import NAME


def test_attach_and_config_refuse_an_argument_beside_a_codec_in_the_same_words() -> None:
    said = []
    for take in (cgx_ray.CGXConfig, lambda **given: cgx_ray.attach(nn.Linear(1, 1), **given)):
        with pytest.raises(cgx_ray.ConfigError) as caught:
            take(codec="qsgd", fidelity="fast")
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert said[0].startswith("codec means policy 'static', which has no fidelity; leave one of them out")
    with pytest.raises(cgx_ray.ConfigError, match="did you mean 'sra'"):
        cgx_ray.CGXConfig(scheme="sar")


def test_one_process_is_told_what_more_would_need(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, NAME)
    cgx_ray.attach(nn.Linear(1, 1))
    (line,) = [one.getMessage() for one in caplog.records if one.name.startswith(NAME)]
    assert "one process: no gradients to exchange, nothing is compressed; with more, attach needs a Dist" in line
    assert line.endswith("this is a Linear")
