"""The primitives of slapo-fusion keep the promises that every primitive must keep."""

from __future__ import annotations

from typing import Any

import pytest

from slapo_fusion import bind, compile, cudagraphify, decompose, fuse, quantize
from slapo_testing import parametrize_checks

pytestmark = pytest.mark.ranks

CASES = [case for module in (bind, compile, cudagraphify, decompose, fuse, quantize) for case in module.slapo_cases()]


@parametrize_checks(CASES)
def test_a_primitive(check: Any) -> None:
    check()
