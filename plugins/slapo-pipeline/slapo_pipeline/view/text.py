"""The stages as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slapo_pipeline.view.data import Crossing, Stages, StageView

__all__ = ["text_of"]


def text_of(stages: Stages) -> str:
    """A table of the stages; what passes each boundary; ties and output."""
    batch = ", ".join(f"{name} {what}" for name, what in stages.batch.items())
    lines = [f"{len(stages.stages)} stages of {stages.model}, for {batch}", ""]
    heads = ("stage", "modules", "parameters", "forward FLOPs", "reads from the batch")
    lines += _table([heads, *(_row(stage) for stage in stages.stages)], right=(2, 3))
    if stages.ties:
        lines.append("")
    for name, users in stages.ties.items():
        lines.append(f"* tied: {name}, in the stages {_listed(users)}")
    for stage in stages.stages[:-1]:
        lines += ["", f"stage {stage.index} -> {stage.index + 1}: {_size(stages.bytes_sent(stage.index))}"]
        lines += [f"  {line}" for line in _table([_passing(crossing) for crossing in stage.sent], right=(2,))]
    made = ", ".join(f"{name} (stage {stage})" for name, stage in stages.outputs.items())
    lines += ["", f"output: {made}"]
    lines += [f"note: {note}" for note in stages.notes]
    return "\n".join(lines)


def _row(stage: StageView) -> tuple[str, ...]:
    modules = stage.first if stage.first == stage.last else f"{stage.first} .. {stage.last}"
    return (
        str(stage.index),
        modules,
        f"{stage.parameters:,}{'*' if stage.tied else ' '}",
        "-" if stage.flops is None else f"{stage.flops:,}",
        ", ".join(stage.inputs) or "-",
    )


def _passing(crossing: Crossing) -> tuple[str, ...]:
    about = ["gradient" if crossing.requires_grad else "no gradient"]
    if crossing.is_relayed:
        about.append(f"relayed from stage {crossing.producer}")
    if crossing.consumers:
        about.append(f"for stage{'s' if len(crossing.consumers) > 1 else ''} {_listed(crossing.consumers)}")
    else:
        about.append("for the output")
    shape = f"({', '.join(crossing.shape)}{',' if len(crossing.shape) == 1 else ''})"
    return crossing.name, f"{shape} {crossing.dtype}", _size(crossing.nbytes), ", ".join(about)


def _table(rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> Iterator[str]:
    """Rows of one text a column, in columns of one width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            text.rjust(width) if column in right else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _listed(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last


def _size(nbytes: int) -> str:
    return f"{nbytes:,} bytes"
