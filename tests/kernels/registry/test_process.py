"""What importing and dispatching do to the process: no torch, no CUDA, no file, no socket (P23, P38, P39, P41, P43)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import rapid_llm.kernels as kernels
from tests import warm

ROOT = Path(kernels.__file__).parents[2]


def run(code: str, python: str = "", **env: str) -> str:
    """What the code prints in a process of its own, of `python` or else of one that has imported nothing yet."""
    done = subprocess.run(
        [python or sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **env},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_imports_no_torch_and_no_triton() -> None:
    code = (
        "import sys, rapid_llm, rapid_llm.kernels; print([m for m in ('torch', 'triton', 'numpy') if m in sys.modules])"
    )
    assert run(code) == "[]"


def test_importing_writes_nothing_starts_nothing_connects_nowhere() -> None:
    code = """
        import sys
        bad = []
        def watch(event, args):
            writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
            if writes or event.startswith(("subprocess", "socket", "os.mkdir", "os.rename", "os.system", "os.fork")):
                bad.append((event, args[:1]))
        sys.addaudithook(watch)
        import rapid_llm, rapid_llm.kernels
        print(bad)
    """
    assert run(code) == "[]"


def test_every_op_works_without_a_network() -> None:
    code = """
        import socket
        def refuse(*args, **kwargs): raise OSError("the network is off")
        socket.socket.connect = refuse
        socket.getaddrinfo = refuse
        import torch, rapid_llm.kernels as k
        print(float(k.scale(torch.ones(1), 2.0)), k.rmsnorm(torch.ones(1, 8), torch.ones(8)).shape)
    """
    assert run(code, warm.executable()) == "2.0 torch.Size([1, 8])"


def test_dispatch_leaves_the_process_able_to_fork() -> None:
    code = """
        import os, torch, rapid_llm.kernels as k
        from rapid_llm.kernels.registry import listing
        k.scale(torch.ones(4), 2.0), listing("cpu"), str(k.explain("linear", device="cpu"))
        print(torch.cuda.is_initialized(), flush=True)
        child = os.fork()
        if child == 0:
            os._exit(int(torch.cuda._is_in_bad_fork()))
        print(os.waitpid(child, 0)[1])
    """
    assert run(code, warm.executable()).split() == ["False", "0"]


def test_a_read_only_home_is_no_error(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o555)
    try:
        code = "import torch, rapid_llm.kernels as k; print(float(k.scale(torch.ones(1), 2.0)))"
        assert run(code, warm.executable(), HOME=str(home), RAPID_LLM_CACHE_DIR=str(home / "cache")) == "2.0"
    finally:
        home.chmod(0o755)


@pytest.mark.parametrize("name", ["scale", "kernels_do_not_have_this"])
def test_attribute_access(name: str) -> None:
    assert hasattr(kernels, name) is (name == "scale")
