"""What the author asked for: one kernel, by one path, in this checkout or in a package of its own."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import rapid_llm
import rapid_llm.kernels
from rapid_llm.kernels.registry import KernelSpec, OpSpec, Out, RegistrationError, ops, plugins

PATHS: Final = ("triton", "jit", "nvrtc", "aot", "external", "cpp")
_PLAIN: Final = re.compile(r"[a-z][a-z0-9_]*")
_FLOATS: Final = ("fp32", "fp16", "bf16")


class AuthoringError(ValueError):
    """A kernel that cannot be made as asked: says which word is wrong, and what to type instead."""


@dataclass(frozen=True, slots=True)
class Request:
    """op: its id. known: its declaration, where it is registered already and gets only a row. root: the checkout, or
    the folder of the package to be. in_checkout: which of the two. library: for `external`, what is imported."""

    op: str
    group: str
    path: str
    why: str
    root: Path
    in_checkout: bool
    library: str = ""
    variant: str = ""
    known: OpSpec | None = None

    @property
    def function(self) -> str:
        """The public function's name."""
        return self.op.replace(".", "_")

    @property
    def symbol(self) -> str:
        """The name of the kernel's C++ function, and of its files."""
        return f"{self.function}_{self.variant}" if self.variant else self.function

    @property
    def package(self) -> str:
        """The Python package that a third party's kernel lives in."""
        return re.sub(r"\W", "_", self.root.name.lower())

    @property
    def backend(self) -> str:
        """The new row's backend: the path's own, or, beside rows of this package, the name of the other package."""
        if self.known is not None and not self.in_checkout:
            return self.package
        return {"triton": "native", "external": self.library}.get(self.path, self.path)

    @property
    def row(self) -> str:
        """The new row's name."""
        return f"{self.backend}/{self.op}" + (f".{self.variant}" if self.variant else "")

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What the scaffold's kernel is written for."""
        label = _FLOATS if self.known is None else tuple(d for d in self.known.dtypes if d in _FLOATS)
        return ("fp32",) if self.path == "cpp" else label


def checkout() -> Path:
    """The root of the source tree that this package runs from."""
    return Path(rapid_llm.__file__).resolve().parents[1]


def is_checkout(root: Path) -> bool:
    """Whether the running package lies in a source tree at `root`, with its tests, and not in an installation."""
    return root == checkout() and (root / "tests" / "kernels").is_dir() and (root / "pyproject.toml").is_file()


def request(
    op: str, *, group: str | None, path: str, why: str, into: Path | None, library: str | None, variant: str | None
) -> Request:
    """Check every word; raises `AuthoringError`."""
    plugins.scan()
    if path not in PATHS:
        raise AuthoringError(f"--path {path}: use one of {', '.join(PATHS)}")
    _check_op(op)
    known = next((spec for spec in ops() if spec.id == op), None)
    if known is not None and group not in (None, known.group):
        raise AuthoringError(f"--group {group}: {op} exists, in the group {known.group}; leave --group out")
    if known is None and group is None:
        raise AuthoringError(f"{op} is a new op: give the group it belongs to, such as --group elementwise")
    for option, word in (("--group", group), ("--library", library), ("--variant", variant)):
        if word is not None and (not _PLAIN.fullmatch(word) or keyword.iskeyword(word)):
            raise AuthoringError(f"{option} {word}: use lower-case letters, digits and _, a letter first")
    if (path == "external") != (library is not None):
        raise AuthoringError(
            "--path external needs --library NAME, the module that is imported; no other path takes it"
        )
    root, in_checkout = _place(op, into)
    if path == "aot" and not in_checkout:
        raise AuthoringError("--path aot adds to this package's own extension: run it in a checkout, or use --path jit")
    made = Request(
        op=op,
        group=known.group if known is not None else str(group),
        path=path,
        why=_one_line(why),
        root=root,
        in_checkout=in_checkout,
        library=library or "",
        variant=variant or "",
        known=known,
    )
    _check_row(made)
    return made


def _check_op(op: str) -> None:
    """The registry's own rule for ids, and Python's for the function's name."""
    try:
        made = OpSpec(
            id=op,
            schema="(Tensor input) -> Tensor",
            group="x",
            dims={},
            out=Out("input.shape", "input.dtype"),
            dtypes=_FLOATS,
            oracle="a:b",
            cases="a:b",
            bound="a:b",
            work="a:b",
            doc="x",
        )
    except RegistrationError as error:
        raise AuthoringError(f"{error}; use names such as gelu or attention.tree") from None
    if made.function.startswith("test_"):
        raise AuthoringError(f"{op}: {made.function} cannot be the name of a function; choose another")
    clash = [spec.id for spec in ops() if spec.function == made.function and spec.id != op]
    if clash:
        raise AuthoringError(f"{op}: its function {made.function} is that of the op {clash[0]}; choose another name")


def _place(op: str, into: Path | None) -> tuple[Path, bool]:
    """The root to write below, and whether it is this checkout: by default it is, if the current folder is in it."""
    root = checkout()
    if into is not None:
        return into.resolve(), is_checkout(into.resolve())
    here = Path.cwd().resolve()
    if is_checkout(root) and here.is_relative_to(root):
        return root, True
    return here / f"rapid_llm_{op.replace('.', '_')}", False


def _check_row(made: Request) -> None:
    """The row's name by the registry's rule, and what a scaffold cannot do."""
    if not made.in_checkout and not _PLAIN.fullmatch(made.package):
        raise AuthoringError(f"--into {made.root}: the folder's name becomes the package's; begin it with a letter")
    shadowed = made.root / "rapid_llm" / "kernels" / "ops" / f"{made.group}.py"
    if made.in_checkout and (shadowed.exists() or made.group == "include"):
        raise AuthoringError(f"--group {made.group}: the folder would stand before what is there; choose another")
    if made.known is not None and made.path == "triton":
        raise AuthoringError(
            f"{made.op} has its native row, which is its Triton row: edit that, or choose another path for a new row"
        )
    try:
        probe = None if made.path == "triton" else "a:b"
        KernelSpec(name=made.row, op=made.op, backend=made.backend, target="a:b", available=probe)
    except RegistrationError as error:
        raise AuthoringError(str(error)) from None
    known = made.known
    if known is None:
        if made.variant:
            raise AuthoringError(f"--variant {made.variant}: {made.op} is new, its first rows need no variant")
        return
    if known.out is not None and ".dtype" not in known.out.dtype:
        raise AuthoringError(
            f"{made.op}: its result is no float tensor, which is all that a scaffold can fill; "
            "write the row by docs/adding-a-kernel.md"
        )
    if made.path == "cpp" and "fp32" not in known.dtypes:
        raise AuthoringError(f"{made.op} takes {', '.join(known.dtypes)}; the scaffold for cpp is for fp32")


def _one_line(why: str) -> str:
    text = " ".join(why.split())
    if text and not text.isascii():
        raise AuthoringError("--why: use ASCII, it goes into a .cu file")
    if "\\" in text or '"""' in text or not text.isprintable():
        raise AuthoringError('--why: use plain text without \\ or """, it goes into a docstring and a comment')
    return text[:1].upper() + text[1:].rstrip(".") + "." if text else ""
