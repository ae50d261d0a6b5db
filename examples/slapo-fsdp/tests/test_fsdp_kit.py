"""`fsdp` keeps the promises of every dialect."""

from slapo_fsdp import slapo_cases

from slapo_testing import parametrize_dialect_checks


@parametrize_dialect_checks(slapo_cases())
def test_fsdp(check):
    check()
