"""`slapo plugins new NAME`: a package that installs and passes its tests as it is."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import slapo_testing
from slapo_core.errors import ArgumentError
from slapo_core.plugins import core_version
from slapo_testing.distributions import FakeEnvironment
from slapo_testing.new_command import Project, render
from tests.messages import Messages
from tests.support.overlay import Overlay

TEMPLATE = Path(slapo_testing.__file__).parent / "template"

PRINTED = """\
wrote acme-slapo/.github/workflows/test.yml
wrote acme-slapo/.gitignore
wrote acme-slapo/LICENSE
wrote acme-slapo/README.md
wrote acme-slapo/pyproject.toml
wrote acme-slapo/src/acme_slapo/__init__.py
wrote acme-slapo/src/acme_slapo/offload.py
wrote acme-slapo/src/acme_slapo/py.typed
wrote acme-slapo/tests/test_offload.py

next:
    cd acme-slapo
    pip install -e '.[test]'
    pytest
    slapo plugins list

then write your primitive in acme-slapo/src/acme_slapo/offload.py
"""


@pytest.mark.slow
def test_new_package_installs_and_passes_its_tests(tmp_path: Path) -> None:
    overlay = Overlay(tmp_path / "env")
    assert overlay.slapo("plugins", "new", "acme-slapo", cwd=tmp_path, check=True).stdout == PRINTED
    package = tmp_path / "acme-slapo"
    overlay.pip_install("-e", ".", cwd=package)
    tests = overlay.run("-m", "pytest", "-v", cwd=package, check=True).stdout
    assert re.search(r"\d+ passed, \d+ skipped", tests), tests
    assert re.search(r"offload-forward_and_gradients_on_2_ranks\] PASSED", tests), tests
    listed = overlay.slapo("plugins", "list", cwd=package).stdout
    assert re.search(r"^acme-slapo +0\.1\.0 +ok +1 primitives", listed, re.MULTILINE), listed
    source = package / "src" / "acme_slapo" / "offload.py"
    without_hooks = source.read_text().replace(
        "torch.autograd.graph.saved_tensors_hooks(pack, unpack)", "torch.enable_grad()"
    )
    source.write_text(without_hooks)
    useless = overlay.run("-m", "pytest", "-k", "forward_and_gradients_on_1_rank", cwd=package)
    assert useless.returncode == 1, "a primitive that does nothing passes"
    assert "0 calls of acme.offload" in useless.stdout


@pytest.mark.breadth
@pytest.mark.slow
def test_new_package_with_a_primitive_of_its_own_passes_its_tests(tmp_path: Path) -> None:
    overlay = Overlay(tmp_path / "env")
    overlay.slapo("plugins", "new", "acme-slapo", "--primitive", "rms_norm", cwd=tmp_path, check=True)
    package = tmp_path / "acme-slapo"
    overlay.pip_install("-e", ".", cwd=package)
    overlay.run("-m", "pytest", "-q", cwd=package, check=True)
    overlay.slapo("plugins", "check", "acme-slapo", cwd=package, check=True)
    assert overlay.slapo("primitives", "rms_norm", cwd=package, check=True).stdout.startswith("acme.rms_norm")


@pytest.mark.breadth
@pytest.mark.slow
def test_the_cases_of_a_new_package_are_found_by_the_command(tmp_path: Path) -> None:
    overlay = Overlay(tmp_path / "env")
    overlay.slapo("plugins", "new", "acme-slapo", cwd=tmp_path, check=True)
    overlay.pip_install("-e", ".", cwd=tmp_path / "acme-slapo")
    checked = overlay.slapo("plugins", "check", "acme-slapo", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout
    assert "forward_and_gradients_on_2_ranks" in checked.stdout
    assert "has no slapo_cases()" not in checked.stdout


@pytest.mark.parametrize(("primitive", "kind"), [(None, "Offload"), ("rms_norm", "RmsNorm")])
def test_every_rendered_file_is_complete_and_well_formed(tmp_path: Path, primitive: str | None, kind: str) -> None:
    written = render(Project.named("Acme.Fast_Kernels", primitive=primitive), tmp_path / "out")
    own = primitive or "offload"
    assert len(written) == len([path for path in TEMPLATE.rglob("*") if path.is_file()]) - 2 == 9
    for path in written:
        text = path.read_text()
        assert not re.search(r"<<\w+>>|__package__|__primitive__", f"{path.name} {text}"), path
        assert primitive is None or "offload" not in f"{path.name} {text}".lower(), path
        if path.suffix == ".py":
            ast.parse(text)
            assert max(map(len, text.splitlines())) <= 120
    project = tomllib.loads((tmp_path / "out" / "pyproject.toml").read_text())["project"]
    assert project["name"] == "acme-fast-kernels"
    assert project["entry-points"] == {
        "slapo.v1.primitives": {f"acme_fast_kernels.{own}": f"acme_fast_kernels.{own}:{kind}"}
    }
    major, minor = (core_version() or "").split(".")[:2]
    assert f"slapo-core>={major}.{minor},<{major}.{int(minor) + 1}" in project["dependencies"]
    assert "${{ matrix.python }}" in (tmp_path / "out/.github/workflows/test.yml").read_text()


@pytest.mark.parametrize(
    ("name", "namespace", "package"),
    [
        ("acme-slapo", "acme", "acme_slapo"),
        ("slapo-hello", "hello", "slapo_hello"),
        ("Acme.Kernels", "acme_kernels", "acme_kernels"),
        ("acme_slapo_quant", "acme_quant", "acme_slapo_quant"),
    ],
)
def test_namespace_and_package_follow_from_the_name(name: str, namespace: str, package: str) -> None:
    project = Project.named(name)
    assert (project.namespace, project.package) == (namespace, package)


REFUSED = {
    "-acme": ("'-acme'", "slapo plugins new acme-slapo"),
    "a/b": ("'a/b'", "slapo plugins new acme-slapo"),
    "slapo-tp": ("'slapo-tp'", "choose another name"),
    "Slapo_Core": ("'slapo-core'", "choose another name"),
    "json": ("package name 'json'", "slapo plugins new slapo-json"),
    "9lives": ("package name '9lives'", "slapo plugins new slapo-9lives"),
    "tp-slapo": ("namespace 'tp'", "slapo plugins new tp-slapo --namespace acme"),
    "slapo": ("namespace ''", "slapo plugins new slapo --namespace acme"),
    "slapo-model": ("namespace 'model'", "slapo plugins new slapo-model --namespace acme"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_names_are_refused(name: str, message: Messages) -> None:
    word, hint = REFUSED[name]
    with pytest.raises(ArgumentError) as caught:
        Project.named(name)
    message(caught, word)
    assert caught.value.hint == hint


@pytest.mark.parametrize("primitive", ["Rms", "rms-norm", "apply", ""])
def test_unusable_primitives_are_refused(primitive: str, message: Messages) -> None:
    with pytest.raises(ArgumentError) as caught:
        Project.named("acme-slapo", primitive=primitive)
    message(caught, repr(primitive))
    assert caught.value.hint == "slapo plugins new acme-slapo --primitive rms_norm"


@pytest.mark.slow
def test_existing_directory_is_refused_unchanged(
    fake_distributions: FakeEnvironment, tmp_path: Path, message: Messages
) -> None:
    (tmp_path / "acme-slapo").mkdir()
    (tmp_path / "acme-slapo" / "README.md").write_text("mine")
    done = fake_distributions.slapo("plugins", "new", "acme-slapo", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    message(done.stderr, "error: acme-slapo already exists", "\n  hint: slapo plugins new acme-slapo --directory OTHER")
    assert [path.name for path in (tmp_path / "acme-slapo").iterdir()] == ["README.md"]


@pytest.mark.slow
def test_directory_and_namespace_can_be_chosen(fake_distributions: FakeEnvironment, tmp_path: Path) -> None:
    options = ("--directory", str(tmp_path / "elsewhere"), "--namespace", "kern")
    done = fake_distributions.slapo("plugins", "new", "slapo-model", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"kern.offload" = "slapo_model.offload:Offload"' in (tmp_path / "elsewhere/pyproject.toml").read_text()
    assert "torch" not in fake_distributions.run("-X", "importtime", "-c", "import slapo_testing.new_command").stderr
