"""Where a model is: a local folder or GGUF file, or what the hub has under a name, downloaded or cached before."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from .reading import CheckpointError, at_home, first_line, is_gguf, read_json, readable_name

HUB_ID = r"\w[\w.-]*/[\w.-]+"
# of a GGUF file in a repository, as llama.cpp and Ollama write it: owner/name:Q4_K_M; or the file's whole name
QUANTIZATION = r"[\w./-]+"
MOST_NAMED = 20  # files in a sentence
LONGEST = 255  # bytes of a file's name, on all usual systems

_SMALL_FILES = ["config.json", "generation_config.json", "*.index.json", "tokenizer*", "special_tokens_map.json"]
_SMALL_FILES += ["added_tokens.json", "chat_template*"]
_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})")


def resolve_model(name: str | Path) -> Path:
    """Where the model is: a local folder or GGUF file, or what the hub has of that id, downloaded unless it is cached.

    The id of a repository is its folder; with a colon and a quantization, one of its GGUF files.
    """
    folder, asked = at_home(Path(name)), re.fullmatch(f"({HUB_ID})(?::({QUANTIZATION}))?", str(name))
    if any(len(os.fsencode(part)) > LONGEST for part in folder.parts):
        raise CheckpointError(f"{readable_name(str(name))} is too long for a name: {LONGEST} bytes between two slashes")
    if is_gguf(folder) and (folder.is_file() or asked is None or not asked[2]):
        if not folder.is_file():
            raise CheckpointError(f"there is no file {folder}")
        return folder
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            named = next(iter(sorted(folder.glob("*.gguf"))), None)
            instead = f"; did you mean {named}?" if named else ""
            raise CheckpointError(f"{folder} is not a model folder: it has no config.json{instead}")
        return folder
    if folder.exists():
        raise CheckpointError(
            f"{folder} is a file; a model is a folder with config.json and weights, or a file whose name ends in .gguf"
        )
    if asked is None:
        raise CheckpointError(
            f"no folder {folder}, and {str(name)!r} is not a hub id of the form owner/name or owner/name:Q4_K_M"
        )
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError:
        raise CheckpointError(
            f'no folder {folder}; to download it as a hub id, first run: pip install -e ".[hf]"'
        ) from None
    try:
        if asked[2]:
            return _gguf_of(hub, asked[1], asked[2])
        folder = Path(hub.snapshot_download(str(name), allow_patterns=[*_SMALL_FILES, "model*.safetensors"]))
        if not any(folder.glob("model*.safetensors")):
            hub.snapshot_download(str(name), allow_patterns=["pytorch_model*.bin"])
    except CheckpointError:
        raise
    except Exception as error:  # the network and the hub fail in ways we cannot list
        refused = _refused(error)
        missed = isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)) and refused is None
        cached = find_downloaded(str(name)) if missed else None  # the library also misses files that nobody needs
        if cached is None or not _is_whole(cached, _listed(hub, str(name))):
            said = f"no folder {Path(name)}, and the hub did not provide it: {first_line(refused or error)}"
            raise CheckpointError(said) from error
        folder = cached
        _stands_in(name)
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{name} on the hub is not a model that can be read: it has no config.json (for one of its GGUF files, if "
            f"it has such, append the quantization, as in {name}:Q4_K_M)"
        )
    return folder


def _refused(error: BaseException) -> BaseException | None:
    """The hub's own answer, if it gave one, such as that a repository is gated; None if it was out of reach."""
    from huggingface_hub import errors

    own = error if isinstance(error, errors.HfHubHTTPError) else error.__cause__
    if not isinstance(own, errors.HfHubHTTPError):
        return None
    return own if getattr(own.response, "status_code", 400) < 500 else None


def _stands_in(name: str | Path) -> None:
    warnings.warn(f"{name}: the hub is out of reach, what its cache holds is read", stacklevel=3)


def _listed(hub: Any, repository: str) -> list[str]:
    """The files of a repository that its cache knows of; none where the library kept no list, as older ones do."""
    from huggingface_hub import errors

    if not hasattr(hub, "get_cached_repo_tree"):
        return []
    try:
        return [file.path for file in hub.get_cached_repo_tree(repository)]
    except errors.CachedRepoTreeNotFoundError:
        return []


def _is_whole(folder: Path, listed: Iterable[str]) -> bool:
    """Whether a folder has a tokenizer, all weights in safetensors, and the small files listed that are read."""
    read = [name for name in listed if any(fnmatch(name, pattern) for pattern in _SMALL_FILES)]
    if any(name.endswith((".json", ".jinja")) and not (folder / name).is_file() for name in read):
        return False
    index = folder / "model.safetensors.index.json"
    shards = {"model.safetensors"}
    if index.is_file() and not (folder / "model.safetensors").is_file():
        found = read_json(index).get("weight_map")
        shards = set(map(str, found.values())) if isinstance(found, dict) else shards
    has_tokenizer = any((folder / f"tokenizer.{kind}").is_file() for kind in ("json", "model"))
    return has_tokenizer and all((folder / shard).is_file() for shard in shards)


def find_downloaded(name: str) -> Path | None:
    """What `resolve_model` would read of a hub id, None if it is not there yet or the name is another."""
    asked = re.fullmatch(f"({HUB_ID})(?::({QUANTIZATION}))?", name)
    with contextlib.suppress(ImportError, OSError, ValueError):
        if at_home(Path(name)).exists() or asked is None:
            return None
        import huggingface_hub as hub

        if asked[2]:
            return _cached_gguf(hub, asked[1], asked[2])
        found = hub.try_to_load_from_cache(name, "config.json")
        return Path(found).parent if isinstance(found, str) else None
    return None


def _gguf_of(hub: Any, repository: str, quantization: str) -> Path:
    """The GGUF file of that quantization, or the first of its parts; without a network, the cache is looked through."""
    try:
        files = hub.list_repo_files(repository)
    except Exception as error:
        if _refused(error):
            raise
        try:
            found = _cached_gguf(hub, repository, quantization)
        except CheckpointError as unsuitable:
            raise CheckpointError(f"{unsuitable}; that is its cache, as the hub is out of reach") from error
        except (OSError, ValueError):
            raise error from None
        _stands_in(f"{repository}:{quantization}")
        return found
    parts = [hub.hf_hub_download(repository, file) for file in choose(repository, quantization, files)]
    return Path(parts[0])


def _cached_gguf(hub: Any, repository: str, quantization: str) -> Path:
    folder = Path(hub.snapshot_download(repository, allow_patterns=[], local_files_only=True))
    files = [str(file.relative_to(folder).as_posix()) for file in folder.rglob("*") if file.is_file()]
    return folder / choose(repository, quantization, files)[0]


def choose(repository: str, quantization: str, files: Iterable[str]) -> list[str]:
    """The parts of the one GGUF model among a repository's files that has this name, or this word in it, in any case.

    "Q4_K" is no word of "Q4_K_M", nor "Q4_XS" of "IQ4_XS". A projector of images (mmproj) is no such model. Where a
    model is there in one file and in several, it is the one.
    """
    models: dict[str, dict[str, list[str]]] = {}  # name -> number of its parts, "" for a whole file -> files
    for file in sorted(files):
        stem, dot, ending = file.rpartition(".")
        if dot and ending.lower() == "gguf" and not _base(stem).startswith("mmproj"):
            part = _PART.fullmatch(stem)
            models.setdefault(part[1] if part else stem, {}).setdefault(part[2] if part else "", []).append(file)
    begins = r"(?:(?<![^\W])|(?<=_)(?=[a-z]+\d))"  # behind an underscore only what begins as quantizations do
    name = re.sub(r"\.gguf$", "", quantization, flags=re.IGNORECASE)
    word = re.compile(rf"{begins}{re.escape(name)}(?!\w)", re.IGNORECASE)
    found = [model for model in models if word.search(model)]
    same = [model for model in found if name in (model, _base(model))]
    alike = [model for model in found if name.lower() in (model.lower(), _base(model).lower())]
    for one in (same, alike, found):
        if len(one) == 1:
            return min(models[one[0]].items())[1]
    if not models:
        raise CheckpointError(f"{repository} has no GGUF files, so none of {quantization}")
    bases = [_base(model) for model in found or models]
    twice = len({base.lower() for base in bases}) < len(bases)
    named = [readable_name(name) for name in (found or models if twice else bases)]
    more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    listed = f"{', '.join(named[:MOST_NAMED])}{more}"
    if found:
        raise CheckpointError(
            f"{repository} has several GGUF models of {quantization}: {listed}; put one of these names behind the colon"
        )
    raise CheckpointError(f"{repository} has no GGUF model of {quantization}; it has {listed}")


def _base(path: str) -> str:
    return path.rpartition("/")[2]
