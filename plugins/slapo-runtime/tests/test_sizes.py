"""Amounts of memory as people write them."""

from pathlib import Path

import pytest
import torch

from slapo_core.errors import ArgumentError
from slapo_runtime.sizes import format_bytes, parse_bytes
from slapo_runtime.weights.files import export_plain
from tests.messages import Messages


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        (70 * 2**30, 70 * 2**30),
        ("70GiB", 70 * 2**30),
        ("70GB", 70 * 10**9),
        ("500MiB", 500 * 2**20),
        (" 1.5 KiB ", 1536),
        ("2kB", 2000),
        ("2KB", 2000),
        ("0.3MB", 300_000),
        ("1TiB", 2**40),
        ("12B", 12),
        ("12", 12),
    ],
)
def test_sizes_are_parsed_by_their_units(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("70G", 'memory="70GiB"'),
        ("70gib", 'memory="70GiB"'),
        ("70Gb", 'memory="70GB"'),
        ("much", 'memory="70GiB"'),
        ("", 'memory="70GiB"'),
        ("-1GiB", 'memory="70GiB"'),
        ("1e3", 'memory="70GiB"'),
        ("1_0GiB", 'memory="70GiB"'),
        ("\u0663GiB", 'memory="70GiB"'),
        ("9" * 5000, 'memory="70GiB"'),
        (7e10, "memory=70000000000"),
        (float("nan"), 'memory="70GiB"'),
        (True, 'memory="70GiB"'),
        (None, 'memory="70GiB"'),
    ],
)
def test_other_sizes_are_refused_with_the_corrected_call(text: object, hint: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_bytes(text)  # type: ignore[arg-type]
    assert str(caught.value).startswith("memory must be ")
    assert str(caught.value).endswith(f"(got {text!r})\n  hint: {hint}")


@pytest.mark.parametrize("size", ["1.5GB", "500B", "5gb", "5Gb"])
def test_the_limit_of_a_file_is_written_like_every_other_size(size: str, tmp_path: Path) -> None:
    try:
        parse_bytes(size)
    except ArgumentError as error:
        with pytest.raises(ArgumentError, match=f"max_shard_size={str(error).rpartition('=')[2]}"):
            export_plain({"weight": torch.ones(2)}, tmp_path, size)
    else:
        export_plain({"weight": torch.ones(2)}, tmp_path, size)
        assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.parametrize("size", [0, -5, "0GiB", "0.1B"])
def test_a_size_is_at_least_one_byte(size: int | str, message: Messages) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_bytes(size, name="budget")
    message(caught, "budget", f"got {size!r}", 'budget="70GiB"')


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (1536, "1.5KiB"),
        (2**20 - 1, "1MiB"),
        (70 * 2**30, "70GiB"),
        (int(105.33 * 2**20), "105.33MiB"),
        (-2048, "-2KiB"),
        (3 * 2**60, "3072PiB"),
    ],
)
def test_sizes_are_shown_in_binary_units(size: int, text: str) -> None:
    assert format_bytes(size) == text
