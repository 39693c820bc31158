"""Facts that enter keys beside files: torch, Python and ABI, found without importing torch."""

from __future__ import annotations

import importlib.machinery
import re
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path


def python_facts() -> dict[str, str]:
    """What an extension module for this interpreter depends on, beyond the limited API."""
    return {"python": sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag or sys.version}


def torch_facts() -> dict[str, str]:
    """torch's version, CUDA and C++ ABI: for units that use its headers or its binary interface."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return {
            "torch": str(torch.__version__),
            "torch_cuda": str(torch.version.cuda),
            "cxx11_abi": str(torch.compiled_with_cxx11_abi()),
        }
    found = _version_file()
    # Every torch that this package takes (2.11 and later) is built with the new ABI.
    return {"torch": found.get("__version__", "none"), "torch_cuda": found.get("cuda", "None"), "cxx11_abi": "True"}


def _version_file() -> Mapping[str, str]:
    """The assignments of torch/version.py."""
    spec = importlib.machinery.PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return {}
    found = re.findall(r"^(\w+)\s*(?::[^=]+)?=\s*'([^']*)'", text, re.MULTILINE)
    return dict(found)
