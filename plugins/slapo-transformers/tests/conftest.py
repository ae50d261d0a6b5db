"""What a host sets for the process goes with the test, and a launch that another test left is not one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """Take out a launcher's variables; put back all, and the default type."""
    dtype = torch.get_default_dtype()
    with mock.patch.dict(os.environ):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        yield
    torch.set_default_dtype(dtype)
