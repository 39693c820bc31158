"""Which architecture a kernel is compiled for: that of the tensor's device, within what TORCH_CUDA_ARCH_LIST allows."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

from .errors import BuildError

VARIABLE: Final = "TORCH_CUDA_ARCH_LIST"
_ENTRY: Final = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")
_NATIVE: Final = "native"
"""Torch's word for the visible devices' own: what holds here while the variable is unset."""
_NAMES: Final = {
    "Kepler+Tesla": "3.7",
    "Kepler": "3.5+PTX",
    "Maxwell+Tegra": "5.3",
    "Maxwell": "5.0;5.2+PTX",
    "Pascal": "6.0;6.1+PTX",
    "Volta+Tegra": "7.2",
    "Volta": "7.0+PTX",
    "Turing": "7.5+PTX",
    "Ampere+Tegra": "8.7",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell+Tegra": "11.0",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}
"""The families that torch's own build understands by name."""


@dataclass(frozen=True, slots=True)
class Arch:
    """One entry: 90 for 9.0; suffix `a` (this SM alone) or `f` (its family); ptx: also in the driver's own language."""

    sm: int
    suffix: str = ""
    ptx: bool = False

    @property
    def code(self) -> str:
        return f"sm_{self.sm}{self.suffix}"

    def runs_on(self, sm: int) -> bool:
        """Whether its machine code runs there: the same major version and no newer, or exactly this SM (`a`)."""
        if self.suffix == "a":
            return sm == self.sm
        return sm // 10 == self.sm // 10 and sm >= self.sm


def arch_list() -> tuple[Arch, ...] | None:
    """What TORCH_CUDA_ARCH_LIST says, or None if it is unset. A bad entry is a `BuildError` that names it."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text.strip(";, ") or text == _NATIVE:
        return None
    entries = []
    for word in re.split(r"[;,\s]+", text.strip(";, ")):
        entries += _NAMES.get(word, word).split(";")
    return tuple(_entry(word, text) for word in entries)


def nvcc_arch(sm: int) -> str:
    """The architecture to compile for so that SM version `sm` (90 for 9.0) runs it: `sm_90`, or `compute_80` for PTX.

    Without TORCH_CUDA_ARCH_LIST it is the device's own. With it, the closest entry that the device runs.
    """
    listed = arch_list()
    if listed is None:
        return f"sm_{sm}"
    exact = [entry for entry in listed if entry.runs_on(sm)]
    if exact:
        return max(exact, key=lambda entry: (entry.sm, entry.suffix)).code
    portable = [entry for entry in listed if entry.ptx and entry.sm <= sm]
    if portable:
        return f"compute_{max(portable, key=lambda entry: entry.sm).sm}"
    raise BuildError(
        f"{VARIABLE}={os.environ[VARIABLE]} has no entry that the device's sm_{sm} runs; "
        f"add {sm // 10}.{sm % 10}, or unset it"
    )


def gencode(arch: str) -> tuple[str, str]:
    """nvcc's option for one architecture: machine code for `sm_90`, PTX for `compute_80`."""
    found = re.fullmatch(r"(sm|compute)_(\d+[af]?)", arch)
    if found is None:
        raise BuildError(f"architecture {arch!r}: use sm_90, sm_90a or compute_90")
    return "-gencode", f"arch=compute_{found[2]},code={arch}"


def _entry(word: str, text: str) -> Arch:
    found = _ENTRY.fullmatch(word)
    if found is None:
        raise BuildError(f"{VARIABLE}={text}: {word!r} is no architecture; use entries such as 9.0, 9.0a or 8.0+PTX")
    return Arch(int(found[1]) * 10 + int(found[2]), found[3], bool(found[4]))
