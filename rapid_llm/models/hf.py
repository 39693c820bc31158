"""Models by their id on the Hugging Face hub: only the files that are needed, into the hub's own cache.

A model that is whole in the cache is used as it is, with no network; `pull` asks for what is new. Files are chosen by
name before any is fetched, so that a repository's other formats cost nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .errors import DownloadError, ModelError, TensorSetError, UnknownModelError, UnsafeWeightsError
from .pickled import INDEX as PICKLED_INDEX
from .pickled import SINGLE as PICKLED
from .safetensors import INDEX, SINGLE
from .shards import NUMBERED, numbered_set, read_json

BESIDE: Final = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "chat_template.jinja"),
)
"""What a folder holds beside its weights, where the repository has it."""

NEEDED: Final = ("config.json", "tokenizer.json")

_ID: Final = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?(?::(?P<file>[\w./-]+))?"
)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubId:
    """`repo`, such as `Qwen/Qwen3-0.6B`; a revision (branch, tag or commit); and, of a repository of GGUF files, the
    wanted one's name or a part of it between hyphens or dots, such as `Q4_K_M`."""

    repo: str
    revision: str = "main"
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubId | None:
        """`org/name`, `org/name@revision`, `org/name:Q4_K_M` or both; None for a text of any other form."""
        match = _ID.fullmatch(text)
        if match is None or (match["file"] is None and match["repo"].endswith((".gguf", ".safetensors", ".bin"))):
            return None
        return cls(match["repo"], match["revision"] or "main", match["file"])

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"{self.repo}{revision}" + (f":{self.file}" if self.file else "")


def cache() -> Path:
    """The hub's own cache on this machine (HF_HOME, HF_HUB_CACHE); it may not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached_models() -> list[tuple[str, Path]]:
    """(repository, snapshot) of every model whose main revision is in the cache, whole or not."""
    found = []
    for folder in sorted(cache().glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        if snapshot := _snapshot(HubId(repo)):
            found.append((repo, snapshot))
    return found


def find_cached(model: HubId, *, load_format: str = "auto") -> Path | None:
    """The folder, or the GGUF file, of a model that is whole in the cache, without asking the hub; None if it isn't."""
    snapshot = _snapshot(model)
    if snapshot is None:
        return None
    names = [str(p.relative_to(snapshot)) for p in snapshot.rglob("*") if p.is_file()]
    try:
        wanted = _wanted(model, names, load_format, lambda name: snapshot / name)
        if _is_gguf(wanted):
            return (numbered_set(snapshot / wanted[0]) or (snapshot / wanted[0],))[0]
    except ModelError:  # not whole, or not what is asked for: the hub knows
        return None
    whole = all((snapshot / name).is_file() for name in (*wanted, *NEEDED))
    return snapshot if whole else None


def fetch(model: HubId, *, load_format: str = "auto") -> Path:
    """Bring a model's needed files into the cache and return its folder, or its (first) GGUF file.

    huggingface_hub draws the progress. Raises `UnknownModelError` where the hub has no such model, revision or file,
    `DownloadError` where it cannot be reached or refuses, `UnsafeWeightsError` for weights that are pickles, unless
    load_format is `pt`.
    """
    try:
        from huggingface_hub import HfApi, hf_hub_download
    except ImportError as error:
        raise DownloadError(
            f"fetching {model} needs the package huggingface_hub ({error}); pip install huggingface_hub, or give the "
            "path of a folder or file"
        ) from error

    def get(name: str) -> Path:
        return Path(_asked(model, lambda: hf_hub_download(model.repo, name, revision=commit)))

    info = _asked(model, lambda: HfApi().model_info(model.repo, revision=model.revision))
    commit = str(info.sha)
    names = [sibling.rfilename for sibling in info.siblings or ()]
    wanted = _wanted(model, names, load_format, get)
    missing = [] if _is_gguf(wanted) else [name for name in NEEDED if name not in names]
    if missing:
        raise UnknownModelError(f"{model} has no {missing[0]} on the hub, so it is no model that can be run from there")
    paths = [get(name) for name in wanted]
    # By its branch, last: the cache then knows where the branch stands, and can be asked without the network.
    last = Path(_asked(model, lambda: hf_hub_download(model.repo, wanted[0], revision=model.revision)))
    return paths[0] if _is_gguf(wanted) else last.parent


def _snapshot(model: HubId) -> Path | None:
    """Where the cache keeps the revision, by the cache's documented layout."""
    storage = cache() / f"models--{model.repo.replace('/', '--')}"
    commit = model.revision
    if not _COMMIT.fullmatch(commit):
        ref = storage / "refs" / model.revision
        if not ref.is_file():
            return None
        commit = ref.read_text().strip()
    folder = storage / "snapshots" / commit
    return folder if folder.is_dir() else None


def _wanted(model: HubId, names: Collection[str], load_format: str, get: Callable[[str], Path]) -> list[str]:
    """The files to fetch of a repository that holds `names`; `get` fetches one that has to be read first."""
    if model.file is not None:
        return _gguf(model, names)
    index = INDEX if INDEX in names else None
    if index is None and SINGLE not in names and load_format == "pt":
        index = PICKLED_INDEX if PICKLED_INDEX in names else None
        weights = [PICKLED] if index is None and PICKLED in names else []
    else:
        weights = [SINGLE] if index is None and SINGLE in names else []
    if index is not None:
        weight_map = read_json(get(index)).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise TensorSetError(f"{model}: {index} has no table of tensors and files")
        weights = [index, *sorted(set(weight_map.values()))]
    if not weights:
        raise _no_weights(model, names)
    return [name for name in BESIDE if name in names] + weights


def _no_weights(model: HubId, names: Collection[str]) -> ModelError:
    gguf = sorted(name for name in names if name.endswith(".gguf"))
    if gguf:
        return UnknownModelError(
            f"{model} holds GGUF files; say which by a part of its name, such as {model.repo}:{_label(gguf[0])}. "
            f"It has {', '.join(gguf)}"
        )
    if PICKLED in names or PICKLED_INDEX in names:
        return UnsafeWeightsError(
            f"{model} has its weights as pickles alone, which can be programs; load_format='pt' reads them with "
            "torch's weights_only unpickler"
        )
    return UnknownModelError(f"{model} has neither {SINGLE} nor {INDEX} nor a .gguf file on the hub")


def _label(name: str) -> str:
    return name.rsplit("/", 1)[-1]


def _gguf(model: HubId, names: Collection[str]) -> list[str]:
    """The GGUF file, or all parts of the split one, that `model.file` names whole or in part."""
    part = re.compile(rf"(?:.*[-./])?{re.escape(str(model.file))}(?:[-.].*)?", re.IGNORECASE)
    gguf = sorted(name for name in names if name.endswith(".gguf"))
    found = [name for name in gguf if name == model.file] or [name for name in gguf if part.fullmatch(name)]
    sets = {NUMBERED.sub(r"\g<stem>", name) for name in found}
    if len(sets) == 1:
        return found
    reason = f"fits {len(sets)} of them" if sets else "fits none"
    raise UnknownModelError(f"{model}: {model.file!r} {reason}; the GGUF files there: {', '.join(gguf) or 'none'}")


def _is_gguf(wanted: Sequence[str]) -> bool:
    return wanted[0].endswith(".gguf")


def _asked(model: HubId, ask: Callable[[], Any]) -> Any:
    """What the hub answers, or an error that says what to do."""
    from huggingface_hub import errors

    try:
        return ask()
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{model} is given to those who accepted its terms: do so at https://huggingface.co/{model.repo} and log "
            "in with 'hf auth login'"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise UnknownModelError(
            f"model '{model}' is neither a file nor a folder here, and the Hugging Face hub has no such model or "
            "revision; check the spelling, and for a private one log in with 'hf auth login'"
        ) from error
    except errors.HFValidationError as error:
        raise UnknownModelError(
            f"model '{model}' is neither a file nor a folder here nor a hub's id: {error}"
        ) from error
    except (OSError, errors.HfHubHTTPError) as error:
        raise _unreachable(model, error) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "requests"):
            raise
        raise _unreachable(model, error) from error


def _unreachable(model: HubId, error: Exception) -> DownloadError:
    first = (str(error).strip().splitlines() or [""])[0]
    return DownloadError(
        f"model '{model}' is neither a file nor a folder here, it is not whole in {cache()}, and the hub cannot be "
        f"asked ({type(error).__name__}: {first:.200}). On a machine that can, run 'hf download {model.repo} "
        "--local-dir DIR', and give the folder's path as the model"
    )
