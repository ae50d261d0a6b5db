"""Typed stubs of the schedule language as installed: a PEP 561 partial stub package for `slapo_core`."""

from __future__ import annotations

from slapo_core.cli.typestubs.package import STUB_PACKAGE, StubPackage, make_stubs

__all__ = ["STUB_PACKAGE", "StubPackage", "make_stubs"]
