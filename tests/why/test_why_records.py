"""Records go to JSON and back as they are, and nothing else is taken for one."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.why.made_records import training

from cgx_ray.errors import ConfigError
from cgx_ray.why.records import RankRecord, from_json, to_json


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.builds(RankRecord))
def test_every_record_survives_json(record: RankRecord) -> None:
    there = json.loads(json.dumps(to_json(record)))
    assert json.dumps(to_json(from_json(RankRecord, there))) == json.dumps(there)


def test_a_record_is_equal_after_json() -> None:
    record = training()[0]
    assert from_json(RankRecord, json.loads(json.dumps(to_json(record)))) == record


@pytest.mark.parametrize("change", [{"rank": "0"}, {"steps": [{"input_s": None}]}, {"unknown": 1}, {"node": 3}])
def test_another_file_is_refused_with_what_to_do(change: dict[str, object]) -> None:
    data = {**to_json(training()[0]), **change}
    with pytest.raises(ConfigError, match=r"no RankRecord of cgx-ray why .*; use the same version"):
        from_json(RankRecord, data)
