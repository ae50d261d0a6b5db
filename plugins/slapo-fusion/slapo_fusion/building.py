"""`build_kernels`: operators of C++ or CUDA sources, built by torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from slapo_core import ArgumentError

__all__ = ["build_kernels"]


def build_kernels(*sources: str | Path, flags: tuple[str, ...] = ("-O3",)) -> None:
    """Build C++ or CUDA sources and register their operators; what was built before is only loaded.

    The sources register them with ``TORCH_LIBRARY(namespace, m) { m.def("name", &function); }``, and
    ``bind("namespace::name")`` finds them. Call it in the program, before the schedule runs, and before it is replayed.

    Args:
        sources: files, ``.cpp`` or ``.cu``.
        flags: for the compiler.

    Raises:
        ArgumentError: a file is not there, or ninja is not, with which torch builds.
        RuntimeError: the compiler refuses the sources; its messages are in the text.
    """
    from torch.utils.cpp_extension import is_ninja_available, load

    paths = [Path(source) for source in sources]
    for path in paths:
        if not path.is_file():
            raise ArgumentError(f"build_kernels: there is no file '{path}'", hint="build_kernels('kernels/gelu.cpp')")
    if not is_ninja_available():
        raise ArgumentError(
            "build_kernels: ninja is not installed, with which torch builds extensions",
            hint="pip install 'slapo-fusion[build]'",
        )
    content = b"\0".join([*(path.read_bytes() for path in paths), *(flag.encode() for flag in flags)])
    name = f"slapo_fusion_{hashlib.blake2b(content, digest_size=8).hexdigest()}"
    load(name, [str(path) for path in paths], extra_cflags=list(flags), is_python_module=False)
