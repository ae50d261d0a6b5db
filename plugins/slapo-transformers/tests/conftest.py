"""What a host sets for the process goes with the test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """Put back environment variables and the default type."""
    dtype = torch.get_default_dtype()
    with mock.patch.dict(os.environ):
        yield
    torch.set_default_dtype(dtype)
