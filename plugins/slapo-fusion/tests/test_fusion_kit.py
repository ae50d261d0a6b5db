"""The primitives of slapo-fusion keep the promises that every primitive must keep."""

from __future__ import annotations

from typing import Any

import pytest

from slapo_fusion.cases import slapo_cases
from slapo_testing import parametrize_checks

pytestmark = pytest.mark.ranks


@parametrize_checks(slapo_cases())
def test_a_primitive(check: Any) -> None:
    check()
