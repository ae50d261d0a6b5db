"""The command line: the same facts for people and for programs, and an exit status that can be relied on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from slapo_core.plugins import current_registry
from slapo_core.plugins.metadata import core_version
from slapo_testing.distributions import FakeDistribution, FakeEnvironment
from tests.dists.healthy import acme
from tests.messages import Messages


@pytest.fixture
def one(fake_distributions: FakeEnvironment) -> FakeEnvironment:
    fake_distributions.install(acme(body=("axis: int", "mode: str = 'zeros'")))
    return fake_distributions


@pytest.mark.slow
def test_the_version_is_that_of_the_distribution(one: FakeEnvironment) -> None:
    done = one.slapo("--version")
    assert (done.returncode, done.stdout) == (0, f"slapo-core {core_version()}\n")


@pytest.mark.slow
def test_the_json_has_one_object_a_distribution_and_sorted_keys(one: FakeEnvironment) -> None:
    one.install(FakeDistribution("bad-slapo", None, {"slapo.v1.primitives": {"bad.x": "b:X"}}))
    done = one.slapo("plugins", "list", "--json")
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    assert done.stdout == json.dumps(listed, indent=2, sort_keys=True) + "\n"
    assert listed["core"] == {"name": "slapo-core", "version": core_version()}
    assert listed["error"] is None
    plugins = {plugin["name"]: plugin for plugin in listed["plugins"]}
    assert list(plugins) == sorted(plugins)
    kinds = current_registry().kinds
    assert {"commands", "compilers", "dialects", "hooks", "patterns", "primitives", "samplers", "tracers"} <= set(kinds)
    assert plugins["acme-slapo"] == {
        **{kind: [] for kind in kinds},
        "name": "acme-slapo",
        "primitives": ["acme.pad"],
        "reason": None,
        "remedy": None,
        "source": str(one.directory / "acme_slapo-1.0.dist-info"),
        "state": "ok",
        "summary": None,
        "version": "1.0",
    }
    assert plugins["bad-slapo"]["state"] == "unusable"
    assert plugins["bad-slapo"]["version"] is None
    assert plugins["bad-slapo"]["primitives"] == []


@pytest.mark.slow
def test_the_table_is_plain_text_in_a_pipe(one: FakeEnvironment) -> None:
    done = one.slapo("plugins", "list", "--kind", "primitives")
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert lines["PLUGIN"].split() == ["PLUGIN", "VERSION", "STATE", "PROVIDES", "REASON"]
    assert lines["acme-slapo"].split() == ["acme-slapo", "1.0", "ok", "acme.pad"]
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout


@pytest.mark.slow
def test_a_distribution_without_entry_points_is_listed_with_its_summary(one: FakeEnvironment) -> None:
    metadata = b"Metadata-Version: 2.1\nName: slapo-verify\nVersion: 1.0\nSummary: Compare models\n"
    one.install(FakeDistribution("slapo-verify", files={"METADATA": metadata}))
    lines = {line.split()[0]: line for line in one.slapo("plugins", "list").stdout.splitlines() if line}
    assert lines["slapo-verify"].split() == ["slapo-verify", "1.0", "ok", "Compare", "models"]
    assert lines["acme-slapo"].split() == ["acme-slapo", "1.0", "ok", "1", "primitives"]
    assert "summary   Compare models\n" in one.slapo("plugins", "show", "slapo-verify").stdout


@pytest.mark.slow
def test_a_wrong_setting_is_shown_with_the_list(one: FakeEnvironment, message: Messages) -> None:
    environ = {"SLAPO_DISABLE_PLUGINS": "acme-slpo"}
    done = one.slapo("plugins", "list", environ=environ)
    assert done.returncode == 1
    assert "acme-slapo" in done.stdout
    error = done.stderr
    message(error, "error: SLAPO_DISABLE_PLUGINS", "'acme-slpo'", "\n  hint: did you mean acme-slapo?")
    as_json = json.loads(one.slapo("plugins", "list", "--json", environ=environ).stdout)
    assert f"error: {as_json['error']}\n" == error
    for command in ("primitives", "dialects"):
        done = one.slapo(command, environ=environ)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", error)


@pytest.mark.slow
def test_show_tells_everything_about_one_plugin(one: FakeEnvironment) -> None:
    done = one.slapo("plugins", "show", "Acme_Slapo")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "plugin    acme-slapo 1.0\n"
        "state     ok\n"
        f"source    {one.directory / 'acme_slapo-1.0.dist-info'}\n"
        "\n"
        "KIND        NAME      OBJECT\n"
        "primitives  acme.pad  acme_slapo:Thing\n"
    )
    assert json.loads(one.slapo("plugins", "show", "acme-slapo", "--json").stdout)["state"] == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["acme", "acme-slap"])
def test_show_of_an_unknown_plugin_suggests_and_fails(one: FakeEnvironment, name: str, message: Messages) -> None:
    done = one.slapo("plugins", "show", name)
    assert (done.returncode, done.stdout) == (2, "")
    message(done.stderr, f"error: no plugin '{name}'", "\n  hint: did you mean acme-slapo")


@pytest.mark.slow
def test_primitives_lists_without_importing_and_shows_one_with_its_arguments(one: FakeEnvironment) -> None:
    one.install(acme("sick-slapo", namespace="sick", bare="cut", before=("1 / 0",)))
    done = one.slapo("primitives")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["acme.pad", "pad", "acme-slapo", "1.0"] in rows
    assert ["sick.cut", "cut", "sick-slapo", "1.0"] in rows
    done = one.slapo("primitives", "pad")
    assert done.stdout == (
        "acme.pad  (acme-slapo 1.0, acme_slapo:Thing)\n"
        "    axis: int\n"
        "    mode: str = 'zeros'\n"
        "\n"
        "Do nothing.\n"
        "\n"
        "rewrite: ``y = f(x)`` -> ``y = f(x)``\n"
    )
    shown = json.loads(one.slapo("primitives", "pad", "--json").stdout)
    assert shown["arguments"][0] == {"default": None, "name": "axis", "required": True, "type": "int"}
    done = one.slapo("primitives", "cut")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "'sick.cut' of sick-slapo 1.0 (sick_slapo:Thing)" in done.stderr


@pytest.mark.slow
def test_primitives_hides_a_bare_name_that_means_several_things(one: FakeEnvironment) -> None:
    one.install(acme("beta-slapo", namespace="beta"))
    rows = [line.split() for line in one.slapo("primitives").stdout.splitlines()]
    assert ["acme.pad", "-", "acme-slapo", "1.0"] in rows
    assert ["beta.pad", "-", "beta-slapo", "1.0"] in rows


@pytest.mark.slow
def test_dialects_are_listed_without_importing(fake_distributions: FakeEnvironment) -> None:
    points = {"slapo.v1.dialects": {"acme": "acme_nothing:Dialect"}}
    fake_distributions.install(FakeDistribution("acme-slapo", entry_points=points))
    rows = [line.split() for line in fake_distributions.slapo("dialects").stdout.splitlines()]
    assert ["acme", "acme-slapo", "1.0"] in rows


PATTERN = """
import slapo_core as slapo


def added(x, y):
    return y + x


class Sum(slapo.Pattern):
    \"\"\"A sum.\"\"\"

    name = "acme.sum"
    replacement = staticmethod(added)

    def alternatives(self):
        yield lambda x, y: x + y
"""


@pytest.mark.slow
def test_patterns_are_listed_without_importing_and_shown_with_their_forms(fake_distributions: FakeEnvironment) -> None:
    points = {"slapo.v1.patterns": {"acme.sum": "acme_slapo:Sum", "acme.gone": "acme_nothing:Gone"}}
    fake_distributions.install(FakeDistribution("acme-slapo", "1.0", points, {"acme_slapo": PATTERN}))
    rows = [line.split() for line in fake_distributions.slapo("patterns", "list").stdout.splitlines()]
    own = [row for row in rows if row[2] == "acme-slapo"]
    assert own == [["acme.gone", "gone", "acme-slapo", "1.0"], ["acme.sum", "sum", "acme-slapo", "1.0"]]
    listed = json.loads(fake_distributions.slapo("patterns", "list", "--json").stdout)
    assert {"acme.gone", "acme.sum"} <= {item["name"] for item in listed}
    shown = fake_distributions.slapo("patterns", "show", "acme.sum").stdout
    for part in ("acme.sum  (acme-slapo 1.0, acme_slapo:Sum)", "A sum.", "yield lambda x, y: x + y", "return y + x"):
        assert part in shown
    as_json = json.loads(fake_distributions.slapo("patterns", "show", "sum", "--json").stdout)
    assert (as_json["name"], as_json["documentation"]) == ("acme.sum", "A sum.")
    missing = fake_distributions.slapo("patterns", "show", "acme.product")
    assert missing.returncode == 2
    assert "pattern 'acme.product'" in missing.stderr
    assert "did you mean 'acme.sum'?" in missing.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("plugins", "list", "--kind", "primitive"), ("plugins", "lst"), ("--no-such",)])
def test_wrong_usage_exits_with_2(one: FakeEnvironment, arguments: tuple[str, ...]) -> None:
    done = one.slapo(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_a_terminal_gets_a_rich_table(one: FakeEnvironment) -> None:
    code = (
        "import os, pty, sys\n"
        "status = pty.spawn([sys.executable, '-m', 'slapo_core.cli.main', 'plugins', 'list'])\n"
        "sys.exit(os.waitstatus_to_exitcode(status))\n"
    )
    done = one.run("-c", code, environ={"TERM": "xterm", "COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    assert "\x1b[1m" in done.stdout
    assert "acme-slapo" in done.stdout


@pytest.mark.slow
def test_text_from_a_plugin_cannot_control_the_terminal(one: FakeEnvironment) -> None:
    one.install(FakeDistribution("rude", "1.0", files={"METADATA": b"Name: rude\nVersion: 1\x1b[31m\n"}))
    info = one.directory / "rude-1.0.dist-info"
    Path(info / "entry_points.txt").write_text("[slapo.v1.dialects]\nrude = rude:X\n")
    done = one.slapo("plugins", "list")
    assert "rude" in done.stdout
    assert "\x1b" not in done.stdout


def test_the_console_script_is_installed() -> None:
    assert (Path(sys.executable).parent / "slapo").exists()
