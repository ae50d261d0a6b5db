"""Names of torch that are not public; a test holds them against the installed version."""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["FakeStore", "FakeTensor", "FakeTensorMode"]
