"""From a request to a plan: which files a kernel consists of, and where each of them goes."""

from __future__ import annotations

from . import shared
from .edits import add_group, append, append_close, import_line, import_names, indent, insert_after
from .existing import schemes, wrapper
from .extension import declare
from .plan import Plan, fill
from .request import AuthoringError, Request

_REGISTRY = "rapid_llm.kernels.registry"
_GPU = ("jit", "nvrtc", "aot")
_SOURCES = {
    "jit": ("kernel.cuh", "launch.h", "module.cu"),
    "nvrtc": ("kernel.cuh",),
    "aot": ("kernel.cuh", "launch.h"),
    "cpp": ("kernel.cpp",),
    "external": (),
}
_SUFFIX = {"jit": "jit", "nvrtc": "nvrtc", "aot": "aot", "cpp": "cpp"}


def plan(request: Request) -> Plan:
    """Every file and edit; raises `AuthoringError` where something is in the way. Writes nothing."""
    made = Plan(request.root)
    values = _values(request)
    new_op, row = request.known is None, request.path != "triton"
    if new_op:
        _op(request, made, values)
    if row:
        _row(request, made, values)
    if request.in_checkout:
        _declare_here(request, made, values)
    else:
        _declare_package(request, made, values)
    _benchmark(request, made, values)
    made.commands = _commands(request, values)
    made.check()
    return made


def _values(request: Request) -> dict[str, str]:
    """What the templates speak of."""
    fn, symbol, here = request.function, request.symbol, request.in_checkout
    suffix = _SUFFIX.get(request.path, request.library)
    group_dir = f"rapid_llm/kernels/ops/{request.group}" if here else request.package
    ops = group_dir.replace("/", ".")
    kind = {"cpp": ".cpp", "nvrtc": ".cuh"}.get(request.path, ".cu")
    include = f"{request.group}/{symbol}" if here else symbol
    module = f"{symbol}_{suffix}"
    library_package = f"rapid_llm.kernels.backend.{request.library}" if here else f"{request.package}.library"
    adapter = f"{library_package}.{symbol}" if here else f"{ops}.{module}"
    return {
        "op": request.op,
        "fn": fn,
        "symbol": symbol,
        "CONST": fn.upper(),
        "group": request.group,
        "why": request.why,
        "row": request.row,
        "backend": request.backend,
        "ops": ops,
        "dir": group_dir,
        "module": module,
        "adapter": adapter,
        "library": request.library,
        "library_package": library_package,
        "verify": f"rapid_llm.verify.{fn}" if here else f"{request.package}.verify",
        "cases": f"rapid_llm.verify.cases.{fn}" if here else f"{request.package}.cases",
        "include": include,
        "source": f'"{include}{kind}"' if here else f'str(Path(__file__).parent / "csrc" / "{include}{kind}")',
        "source_name": "the library's own" if request.path == "external" else f"csrc/{include}{kind}",
        "path_import": "from typing import Final\n" if here else "from pathlib import Path\nfrom typing import Final\n",
        "dtypes": ", ".join(f'"{label}"' for label in request.dtypes) + ("," if len(request.dtypes) == 1 else ""),
        "schemes": schemes(request),
        "package": request.package,
        "distribution": request.package.replace("_", "-"),
        "device": "cuda" if request.path in _GPU else "cpu",
        "stand_in": "input, out",
        "nvrtc_source": f'"{include}.cuh", _instances' + ("" if here else ', root=Path(__file__).parent / "csrc"'),
        "benchmark": f"benchmarks.kernels.{fn}" if here else f"benchmarks.{fn}",
    }


def _op(request: Request, made: Plan, values: dict[str, str]) -> None:
    """The op's native row, and what proves it."""
    fn, here = request.function, request.in_checkout
    made.add(f"{values['dir']}/{fn}.py", fill("native.py", values))
    verify, cases = (values[name].replace(".", "/") + ".py" for name in ("verify", "cases"))
    made.add(verify, fill("verify.py", values))
    made.add(cases, fill("cases.py", values))
    values["test_registers"] = "" if here else f"\nimport {request.package}  # noqa: F401 - the folder is importable\n"
    if here:
        head = "\npytestmark = pytest.mark.interpreter\n"
        helpers = "from rapid_llm.verify.compare import compare\nfrom tests.kernels.devices import DEVICES, DTYPES\n"
        test = f"tests/kernels/test_{fn}_native.py"
    else:
        head = '\nDEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]\n'
        head += "DTYPES = [torch.float32, torch.float16, torch.bfloat16]\n"
        helpers = "from rapid_llm.verify.compare import compare\n"
        test = f"tests/test_{fn}_native.py"
    made.add(test, fill("test_native.py", {**values, "test_registers": "", "test_helpers_native": helpers + head}))


def _row(request: Request, made: Plan, values: dict[str, str]) -> None:
    """The new row's source, wrapper and test."""
    here, symbol = request.in_checkout, request.symbol
    sources = () if shared.shares(request) else _SOURCES[request.path]
    names = {"kernel.cpp": ".cpp", "kernel.cuh": ".cuh", "launch.h": "_launch.h", "module.cu": ".cu"}
    for source in sources:
        made.add(f"{shared.csrc(request)}/{symbol}{names[source]}", fill(source, values))
    if request.path == "external":
        _library(request, made, values)
    if request.path == "aot":
        parameters = shared.launcher(request)
        unit = fill("extension.cu", {**values, **shared.doors(symbol, parameters)})
        made.add(f"csrc/{request.group}/{symbol}.cu", unit)
        declare(made, symbol, parameters)
    text = fill(f"{request.path}_new.py", values) if request.known is None else wrapper(request, values)
    target = values["adapter"] if request.path == "external" else f"{values['ops']}.{values['module']}"
    made.add(target.replace(".", "/") + ".py", text)
    tests = "tests/kernels" if here else "tests"
    gpu = request.path in _GPU
    more = {
        "test_registers": "",
        "test_subject": ", and what its launcher refuses" if request.known is None else "",
        "test_mark": "\npytestmark = pytest.mark.gpu\n" if here and gpu else "",
    }
    if request.path == "external":
        test = fill("test_external.py", {**values, **more})
    else:
        test = fill("test_row.py", {**values, **more})
        test += fill("test_row_new.py", values) if request.known is None else ""
        if request.known is not None:
            test = test.replace("from torch import Tensor\n", "").replace("import torch\n", "")
    folder = f"{tests}/backend" if here and request.path == "external" else tests
    made.add(f"{folder}/test_{values['module']}.py", test)


def _library(request: Request, made: Plan, values: dict[str, str]) -> None:
    """The library as data. One that is known has a stand-in and cases of its own, which no template can add to."""
    path = values["library_package"].replace(".", "/") + ("/__init__.py" if request.in_checkout else ".py")
    if request.in_checkout and (request.root / path).exists():
        raise AuthoringError(
            f"--library {request.library}: {path} exists; add a Call to its LIBRARY, an adapter like the ones "
            "beside it, the function to its stand-in in tests/kernels/backend, and a KernelSpec to the op's group"
        )
    made.add(path, fill("library.py", values))


def declarations(request: Request, values: dict[str, str]) -> tuple[str, list[str]]:
    """The OpSpec's text, empty for an op that exists, and the rows' texts."""
    spec = fill("spec.py", values) if request.known is None else ""
    rows = [fill("row_native.py", values)] if request.known is None else []
    if request.path != "triton":
        rows.append(fill(f"row_{request.path}.py", values))
    return spec, rows


def _declare_here(request: Request, made: Plan, values: dict[str, str]) -> None:
    """The declarations in the group's `__init__.py`, and what the tests ask for of every op."""
    spec, rows = declarations(request, values)
    names = ["KernelSpec", "register", *(["OpSpec", "Out"] if spec else [])]
    path = f"{values['dir']}/__init__.py"
    calls = [f"register(\n{indent(row).rstrip()},\n)\n" for row in rows[1:] if spec] if spec else []
    if spec:
        first = f"register(\n    {values['CONST']},\n{indent(rows[0]).rstrip()},\n)\n"
        calls = [first, *calls]
    else:
        calls = [f"register(\n{indent(row).rstrip()},\n)\n" for row in rows]
    if (request.root / path).exists():
        text = import_names(made.text(path), _REGISTRY, names, path)
        text = append_close(text, spec) if spec else text
        for call in calls:
            text = append_close(text, call)
        made.edit(path, text)
    else:
        head = f'"""Ops of the group {request.group}."""\n\n' + import_line(
            _REGISTRY, ["KernelSpec", "OpSpec", "Out", "register"]
        )
        made.add(path, "\n\n".join([head, spec.strip(), *(call.strip() for call in calls)]) + "\n")
        groups = "rapid_llm/kernels/ops/__init__.py"
        made.edit(groups, add_group(made.text(groups), request.group))
    if spec:
        fn = request.function
        second = f"def _{fn}(input: Tensor) -> Array:\n    return _np(input)  # replace: the op by another route"
        made.edit("tests/reference.py", append(made.text("tests/reference.py"), second))
        example = f'    "{request.op}": [("aligned", lambda dtype: ((torch.zeros(4, 4096, dtype=dtype),), {{}}))],'
        file = "tests/kernels/registry/test_torch_ops.py"
        call = f'        "{request.op}": lambda: {{"input": x}},'
        made.edit(file, insert_after(made.text(file), '        "scale": lambda:', call, file))
        file = "tests/kernels/examples.py"
        made.edit(file, insert_after(made.text(file), "EXAMPLES:", example, file))


def _declare_package(request: Request, made: Plan, values: dict[str, str]) -> None:
    """The package around the kernel: declarations, entry point, and tests that run before it is installed."""
    spec, rows = declarations(request, values)
    names = ["KernelSpec", *(["OpSpec", "Out"] if spec else [])]
    listed = ([values["CONST"]] if spec else []) + [row.strip() for row in rows]
    arguments = "\n" + "".join(f"{indent(item, 8).rstrip()},\n" for item in listed) + "    "
    text = fill(
        "package_init.py",
        {
            "title": values["distribution"],
            "names": ", ".join(names),
            "declarations": spec,
            "arguments": arguments,
        },
    )
    made.add(f"{request.package}/__init__.py", text if spec else text.replace("\n\n\n\ndef", "\n\n\ndef"))
    made.add("pyproject.toml", fill("pyproject.toml", values))
    made.add("README.md", fill("readme.md", values))
    made.add("tests/conftest.py", fill("conftest.py", values))


def _benchmark(request: Request, made: Plan, values: dict[str, str]) -> None:
    """A sweep over the op's rows, unless an earlier row of the op brought it."""
    op = request.known
    folder = values["benchmark"].replace(".", "/").rpartition("/")[0]
    more = {"bench_imports": ""}
    if op is not None:
        more["bench_imports"] = (
            "from rapid_llm.kernels import registry\nfrom rapid_llm.kernels.registry import probes\n"
        )
        more["op_dtypes"] = "".join(f'"{label}", ' for label in op.dtypes).strip()
        more["quick_dtype"] = f'"{op.dtypes[0]}",'
    sweep = fill("benchmark_sweep_new" if op is None else "benchmark_sweep_known", {**values, **more})
    frame = "benchmark_checkout.py" if request.in_checkout else "benchmark_package.py"
    made.add_absent(f"{folder}/__init__.py", '"""Benchmarks of single ops, one module each."""\n')
    made.add_absent(f"{folder}/{request.function}.py", fill(frame, {**values, **more, "sweep": sweep}))


def _commands(request: Request, values: dict[str, str]) -> list[str]:
    """What to type next, in order."""
    here, fn = request.in_checkout, request.function
    tests = "tests/kernels" if here else "tests"
    commands = [] if here else [f"cd {request.root}", "pip install -e ."]
    commands.append(f"python -m pytest {tests} -k {fn}")
    if here and request.known is None:
        commands.append(f"TRITON_INTERPRET=1 python -m pytest tests/kernels -m interpreter -k {fn}")
    if request.path in ("jit", "nvrtc", "aot"):
        commands.append(f"rapid-llm kernels build {request.row} --sm 90")
    elif request.path == "cpp":
        commands.append(f"rapid-llm kernels build {request.row}")
    if here:
        commands.append("make docs")
    commands += [
        f"rapid-llm kernels check{'' if here else ' .'}",
        f"rapid-llm kernels explain {request.op} --backend {request.row}",
        f"python -m {values['benchmark']} --quick",
    ]
    return commands
