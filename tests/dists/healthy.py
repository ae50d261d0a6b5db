"""Well-behaved distributions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slapo_testing.distributions import FakeDistribution, primitive_source


def acme(
    name: str = "acme-slapo",
    *,
    namespace: str = "acme",
    bare: str = "pad",
    version: str = "1.0",
    requires: tuple[str, ...] = (),
    before: Iterable[str] = (),
    body: Iterable[str] = (),
) -> FakeDistribution:
    """A distribution with one healthy primitive ``<namespace>.<bare>``."""
    module = name.replace("-", "_")
    return FakeDistribution(
        name,
        version,
        {"slapo.v1.primitives": {f"{namespace}.{bare}": f"{module}:Thing"}},
        {module: primitive_source(f"{namespace}.{bare}", before=before, body=body)},
        requires,
    )


def with_hooks(name: str, source: str, *, namespace: str | None = None) -> FakeDistribution:
    """A distribution with a hooks module, and one primitive if ``namespace`` is given."""
    module = name.replace("-", "_")
    points = {"slapo.v1.hooks": {module: f"{module}_hooks"}}
    modules = {f"{module}_hooks": f"from slapo_core.hookspecs import hookimpl\n{source}"}
    if namespace is not None:
        points["slapo.v1.primitives"] = {f"{namespace}.thing": f"{module}:Thing"}
        modules[module] = primitive_source(f"{namespace}.thing")
    return FakeDistribution(name, "1.0", points, modules)


def crowd(count: int, sentinel: Path) -> list[FakeDistribution]:
    """Many healthy distributions; importing any of them leaves a file at ``sentinel``."""
    before = (f"open({str(sentinel)!r}, 'a').write(__name__)", "import torch")
    return [
        acme(f"crowd-{number:03}", namespace=f"crowd{number:03}", bare="thing", requires=("slapo-core",), before=before)
        for number in range(count)
    ]


def with_sampler(suggest: str, *, name: str = "acme.last", before: str = "") -> FakeDistribution:
    """A distribution with one sampler, whose ``suggest(self, space, history, seed)`` has this body."""
    body = "".join(f"        {line}\n" for line in suggest.splitlines())
    source = (
        f"import slapo_core as slapo\n{before}\n"
        f"class Thing(slapo.Sampler):\n    name = {name!r}\n"
        f"    def suggest(self, space, history, seed):\n{body}"
    )
    return FakeDistribution(
        "acme-slapo", "1.0", {"slapo.v1.samplers": {name: "acme_slapo:Thing"}}, {"acme_slapo": source}
    )
