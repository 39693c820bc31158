"""A stand-in for g++: a script that does as told by files beside it, so that builds can be slow, fail, or be killed.

`calls` has a line for each compile. `mode` says what the next compile does: `ok`, `fail`, `empty`, `half`, `full disk`,
`killed`, `cut short`. In mode `half` it writes half of its output, says so through the pipe `reached`, and goes on when
someone writes to the pipe `go`: no test waits for a time to pass.
"""

from __future__ import annotations

import os
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from rapid_llm.kernels.build import Artifact, GxxCompiler, Unit, build

_SCRIPT = r"""
import sys
here, args = {here!r}, sys.argv[1:]
if args == ["--version"]:
    print(open(here + "/version").read()); sys.exit(0)
if args == ["-dumpmachine"]:
    print("stand-in"); sys.exit(0)
import os
source = next(a for a in args if a.endswith((".cpp", ".cu")))
folders = [args[i + 1] for i, a in enumerate(args) if a == "-I"]
def text_of(path):
    with open(path) as file:
        return file.read()
def headers(path, found):
    lines = [line.split() for line in text_of(path).splitlines()]
    macros = {{line[1]: line[2] for line in lines if line[:1] == ["#define"] and line[2][:1] == '"'}}
    for line in lines:
        if line[:1] != ["#include"]:
            continue
        name = macros.get(line[1], line[1]).strip('"')
        for folder in [os.path.dirname(path), os.path.dirname(source), *folders]:
            header = os.path.join(folder, name)
            if os.path.exists(header):
                if header not in found:
                    found.append(header); headers(header, found)
                break
    return found
listed = headers(source, [])
if "-M" in args:
    print("x.o: " + " ".join([source, *listed])); sys.exit(0)
output = args[args.index("-o") + 1]
with open(here + "/calls", "a") as calls:
    calls.write(" ".join(args) + "\n")
with open(os.environ["TMPDIR"] + "/scrap", "w") as scrap:
    scrap.write("what compilers leave behind when killed")
mode = text_of(here + "/mode")
data = "".join(map(text_of, [source, *listed])) + f"\nbuilt by {{os.getpid()}}\n"
if mode == "fail":
    print(f"{{source}}:3:7: error: 'nonsense' was not declared in this scope", file=sys.stderr); sys.exit(1)
if mode == "full disk":
    print(f"{{output}}: No space left on device", file=sys.stderr); sys.exit(1)
if mode == "killed":
    os.kill(os.getpid(), 9)
if mode == "empty":
    sys.exit(0)
with open(output, "w") as out:
    out.write(data[: len(data) // 2]); out.flush()
    if mode == "half":
        with open(here + "/pid", "w") as file: file.write(str(os.getpid()))
        with open(here + "/reached", "w") as pipe: pipe.write("x")
        with open(here + "/go") as pipe: pipe.read()
    out.write("" if mode == "cut short" else data[len(data) // 2 :])
"""


@dataclass(frozen=True)
class StandIn:
    """The script and the files that steer it; `unit` is a source with a header behind a macro include."""

    folder: Path
    compiler: GxxCompiler

    def tell(self, mode: str) -> None:
        (self.folder / "mode").write_text(mode)

    @property
    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def wait_until_half_written(self) -> int:
        """Block until a compiler in mode `half` has written half; its process id."""
        with open(self.folder / "reached") as pipe:
            pipe.read()
        return int((self.folder / "pid").read_text())

    def let_go(self) -> None:
        with open(self.folder / "go", "w") as pipe:
            pipe.write("x")


def make(folder: Path, version: str = "stand-in 1.0") -> StandIn:
    """A stand-in in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "g++"
    script.write_text(f"#!{sys.executable} -IS\n" + textwrap.dedent(_SCRIPT.format(here=str(folder))))
    script.chmod(0o755)
    (folder / "version").write_text(version)
    for pipe in ("reached", "go"):
        if not (folder / pipe).exists():
            os.mkfifo(folder / pipe)
    made = StandIn(folder, GxxCompiler((str(script),)))
    made.tell("ok")
    return made


def sources(folder: Path) -> Path:
    """A source tree `csrc/`: a.cpp includes include/one.h, which includes two.h by a macro."""
    root = folder / "csrc"
    (root / "include").mkdir(parents=True)
    (root / "a.cpp").write_text('#include "one.h"\nint a() { return ONE; }\n')
    (root / "include" / "one.h").write_text('#define SECOND "two.h"\n#include SECOND\n#define ONE TWO\n')
    (root / "include" / "two.h").write_text("#define TWO 2\n")
    return root


def unit(root: Path, **changes: object) -> Unit:
    """The unit of `sources`."""
    fields: dict[str, object] = {"flags": ("-O3", "-shared"), "include_dirs": (root / "include",), "arch": "cpu"}
    return Unit(**{"path": "cpp", "name": "a", "source": root / "a.cpp", "output": "a.so", **fields, **changes})  # type: ignore[arg-type]


def whole(path: Path) -> None:
    """The load test of stand-in artifacts: they end as the script ends them."""
    if "built by" not in path.read_text():
        raise OSError("cut short")


def make_artifact(root: Path, compiler: GxxCompiler, **changes: object) -> Artifact:
    return build(unit(root, **changes), compiler, check=whole)


PROCESS = """
import sys
from pathlib import Path
from tests.kernels.build import standin
root, folder = Path(sys.argv[1]), Path(sys.argv[2])
from rapid_llm.kernels.build import GxxCompiler
made = standin.make_artifact(root, GxxCompiler((str(folder / "g++"),)))
print(made.cached, made.path, flush=True)
"""
"""What a process of its own runs to build; arguments: the source tree and the stand-in's folder."""
