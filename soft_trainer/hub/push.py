"""Pushes folders to the Hub, during a run or later with `soft-trainer push DIR USER/NAME`."""

from __future__ import annotations

import json
import logging
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

from soft_trainer.encoders.hub_files import public_name, published_name
from soft_trainer.errors import UserError
from soft_trainer.files import (
    ADAPTER_CONFIG,
    ADAPTER_FILES,
    ADAPTER_WEIGHTS,
    CARD,
    ENCODER_FILES,
    EVAL_RESULTS,
    MERGED_ADAPTER,
    NUMBERS,
    ONNX_FILES,
    PROFILE_FILE,
    PUSHED_ROWS,
    RECORD,
    RECORD_FORMAT,
    ROW_FILES,
    TRAINING_FILES,
    TRAINING_PICTURE,
    WHOLE_FILES,
    files_matching,
    listed_files,
    read_json,
    write_text,
)
from soft_trainer.fingerprints import file_fingerprint, list_files

logger = logging.getLogger(__name__)

REPO_TYPES = ("model", "dataset", "space")
# A pickle runs code when it is loaded, and Trainer's `training_args.bin` contains the token. The others are temporary.
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.joblib", "*.dill")
NEVER_PUSHED = (*PICKLES, ".*", "*/.*", "*.tmp", "*__pycache__*")
# Patterns of the only files that are pushed from an encoder's folder. The folder may also contain logs, ranks, rows
# and a user's files with private source code.
PUSHED_FILES = (
    *(*ENCODER_FILES, CARD, TRAINING_PICTURE, EVAL_RESULTS),
    *(RECORD, NUMBERS, "train_results.json", "eval_results.json"),
)
WEIGHTS = {"model.safetensors", "model.safetensors.index.json", ADAPTER_WEIGHTS}
WAITS = (1, 2, 4, 8, 16)  # seconds before each retry
_TOKENS_PAGE = "https://huggingface.co/settings/tokens"


def check_push(
    hub_model_id: str, token: str | None = None, private: bool | None = None, repo_type: str = "model"
) -> None:
    """Checks that a push to the Hub will work, before a long run. Creates the repository if it does not exist.

    Args:
        hub_model_id: `USER/NAME`.
        token: the token to push with. By default, the one from `HF_TOKEN` or `hf auth login`.
        private: True if a new repository should be private. By default, the account's setting decides.

    Raises:
        UserError: the name is invalid, the token is missing, invalid or does not permit this push, or the Hub cannot
            be reached.
    """
    api = _client(hub_model_id, token, repo_type)
    user = None
    try:
        user = api.whoami()
        _create(api, hub_model_id, private, repo_type)
        api.auth_check(hub_model_id, repo_type=repo_type, write=True)
    except (HTTPError, OSError) as error:
        message = f"cannot push to {hub_model_id}: {reason(error)}"
        if user:
            spaces = ", ".join([user["name"], *(group["name"] for group in user.get("orgs", []))])
            role = user.get("auth", {}).get("accessToken", {}).get("role", "unknown")
            message += f". This token (role {role!r}) belongs to {user['name']}. Use a token with write access from "
            message += f"{_TOKENS_PAGE}, or set USER to one of {spaces}"
        raise UserError(message) from error


def push_folder(
    folder: str | Path,
    hub_model_id: str,
    token: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload",
    repo_type: str = "model",
    path_in_repo: str | None = None,
) -> str:
    """Pushes the files of `folder` in a single commit.

    From an encoder's folder, only PUSHED_FILES and the model's code are pushed. A local path of a teacher or of an
    adapter's base is shortened to its last part. The snippets in the pushed card load the encoder from the repository.
    After a successful push, the card in the folder is updated to match.

    The repository and the branch are created if they do not exist. Files from an earlier push that would conflict with
    this one are deleted: weights of the other type (adapter or whole encoder), and splits. Transient failures are
    retried after the delays in `WAITS`.

    Args:
        token, private: see `check_push`.
        revision: the branch to push to. By default, `main`.
        repo_type: one of `REPO_TYPES`.
        path_in_repo: the folder in the repository to push to.

    Returns:
        The URL of the commit.

    Raises:
        UserError: there is nothing to push, a file contains the token, or the push failed after all retries. The
            message for a failed push includes a command to push later.
    """
    api = _client(hub_model_id, token, repo_type)
    folder = Path(folder)
    contents = _contents(folder, hub_model_id, revision, repo_type)
    _check_contents(folder, contents, api.token)
    replaced = _replaced_files(folder, repo_type)
    places = {"revision": revision, "path_in_repo": path_in_repo}
    # The client retries the requests of an upload, but not the commit. The commit fails after a 500, or if another
    # client commits in between.
    for wait in (*WAITS, None):
        try:
            _create(api, hub_model_id, private, repo_type)
            url = _commit(api, contents, replaced, commit_message, repo_id=hub_model_id, repo_type=repo_type, **places)
            break
        except (HTTPError, OSError, ValueError, RuntimeError) as error:
            # The client wraps a failed upload in a RuntimeError.
            cause = error.__cause__ or error if isinstance(error, RuntimeError) else error
            if wait is None or not _is_retryable(cause):
                later = later_command(folder, hub_model_id, private, repo_type=repo_type, **places)
                what = f"pushing {folder} to {hub_model_id} failed: {reason(cause)}"
                raise UserError(f"{what}. Nothing is lost. To push later, run: {later}") from cause
            logger.warning("Push to %s failed (%s); retrying in %d s.", hub_model_id, reason(cause), wait)
            time.sleep(wait)
    card = contents.get(CARD)
    if isinstance(card, bytes) and not path_in_repo:
        edited = (listed_files(folder) or {}).get(CARD) != file_fingerprint(folder / CARD)
        write_text(folder / CARD, card.decode())
        if not edited:  # an edited card keeps its old hash, so that another run does not overwrite it
            list_files(folder, [folder / CARD])
    return url


def _replaced_files(folder: Path, repo_type: str) -> tuple[str, ...]:
    """Returns patterns for the files that a push replaces completely: weights, or a run's rows."""
    if repo_type == "model":
        return (*WHOLE_FILES, *ADAPTER_FILES, *ONNX_FILES)
    if repo_type == "dataset" and folder.name == PUSHED_ROWS:  # other data sets may be pushed file by file
        return ROW_FILES
    return ()


def _commit(
    api: HfApi,
    contents: Mapping[str, Path | bytes],
    replaced: Sequence[str],
    message: str,
    revision: str | None,
    path_in_repo: str | None,
    **repository: str,
) -> str:
    """Pushes `contents` in one commit, and deletes other files that match `replaced`. Returns the commit's URL."""
    prefix = f"{path_in_repo.strip('/')}/" if path_in_repo else ""
    if revision:
        api.create_branch(branch=revision, exist_ok=True, **repository)
    operations = [CommitOperationAdd(prefix + name, content) for name, content in contents.items()]
    if any(filter_repo_objects(contents, allow_patterns=[*replaced])):
        there = api.list_repo_files(revision=revision, **repository)
        inside = [name.removeprefix(prefix) for name in there if name.startswith(prefix)]
        outdated = {*filter_repo_objects(inside, allow_patterns=[*replaced])} - contents.keys()
        operations += [CommitOperationDelete(prefix + name) for name in sorted(outdated)]
    return api.create_commit(operations=operations, commit_message=message, revision=revision, **repository).commit_url


def _contents(folder: Path, repo_id: str, revision: str | None, repo_type: str) -> dict[str, Path | bytes]:
    """Returns the files to push, keyed by path in the repository: local paths, or bytes if the content must change."""
    paths = _listed(folder, encoder_files(folder)) if repo_type == "model" else folder.rglob("*")
    contents: dict[str, Path | bytes] = {}
    for path in sorted(paths):
        if path.is_file():
            contents[path.relative_to(folder).as_posix()] = path
    if repo_type != "model":
        pushed = filter_repo_objects(contents, ignore_patterns=[*NEVER_PUSHED])
        return {name: contents[name] for name in pushed}
    if contents and WEIGHTS.isdisjoint(contents):
        raise UserError(f"{folder}: no weights to push (model.safetensors or adapter_model.safetensors)")
    if RECORD in contents and read_json(folder / RECORD).get("format") != RECORD_FORMAT:
        logger.warning("%s: not pushed: another version wrote this file, so it may have local paths", folder / RECORD)
        del contents[RECORD]
    if ADAPTER_CONFIG in contents:
        base = published_name(read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path"))
        if base and Path(base).is_dir():
            logger.warning(
                "%s: the adapter's base, %s, exists only on this machine, so nobody else can load the adapter. "
                "Train with merge_lora=True, or push the base and train from its name",
                *(folder, base),
            )
    # Encoders need these two paths on this machine, so they are shortened only in what is pushed.
    for name in (ADAPTER_CONFIG, f"{MERGED_ADAPTER}/{ADAPTER_CONFIG}"):
        if name in contents:
            contents[name] = _with_public_name(folder / name, "base_model_name_or_path")
    if PROFILE_FILE in contents:
        contents[PROFILE_FILE] = _with_public_name(folder / PROFILE_FILE, "teacher")
    if CARD in contents:
        contents[CARD] = named_card((folder / CARD).read_text(encoding="utf-8"), repo_id, revision).encode()
    return contents


def _with_public_name(path: Path, key: str) -> Path | bytes:
    """Returns a JSON file's path or, if the value of `key` is a local path, new content with a shortened path."""
    content = read_json(path)
    name = content.get(key)
    if not name:
        return path
    # A relative path may begin where the run was started, in one of the folders around its output folder.
    local = any((folder / name).exists() for folder in path.resolve().parents)
    public = public_name(name, on_hub=not local)
    if public == name:
        return path
    return json.dumps(content | {key: public}, indent=2).encode() + b"\n"


def _listed(folder: Path, paths: set[Path]) -> set[Path]:
    """Returns the files in `paths` that `run.json` lists, or all files in `paths` if `run.json` has no list.

    Warns about files that are not listed, and about files other than the card that have changed since the run.
    """
    listed = listed_files(folder)
    if listed is None:
        return paths
    known = {folder / name for name in listed} | {folder / RECORD}
    if others := sorted(path.relative_to(folder).as_posix() for path in paths - known if path.is_file()):
        logger.warning("%s: not pushed, because run.json does not list them: %s", folder, ", ".join(others))
    changed = []
    for name, hashed in listed.items():
        if name != CARD and folder / name in paths and hashed != file_fingerprint(folder / name):
            changed.append(name)
    if changed:
        what = "changed since the run, so the results may belong to another encoder"
        logger.warning("%s: %s (%s)", folder, what, ", ".join(changed))
    return paths & known


def encoder_files(folder: Path) -> set[Path]:
    """Returns the files in an encoder's folder that are safe to share. They never contain a user's rows."""
    from transformers.dynamic_module_utils import get_relative_import_files  # slow, and --help should not wait for it

    found = set()
    for pattern in PUSHED_FILES:
        found |= {*folder.glob(pattern)}
    for path in {folder / "config.json", folder / "tokenizer_config.json"} & found:
        for module in re.findall(r'"(\w+)\.\w+"', json.dumps(read_json(path).get("auto_map"))):
            code = folder / f"{module}.py"
            if code.is_file():
                found |= {code, *map(Path, get_relative_import_files(code))}
    return found


def written_files(folder: Path) -> dict[str, str]:
    """Returns the files that training writes to a folder as `{path: hash}`, for the list in `run.json`."""
    names = {path.relative_to(folder).as_posix() for path in encoder_files(folder)}
    names.update(files_matching(folder, TRAINING_FILES))
    names.discard(RECORD)
    return {name: file_fingerprint(folder / name) for name in sorted(names)}


def named_card(card: str, repo_id: str, revision: str | None) -> str:
    """Returns a card whose code snippets load the encoder from this repository."""
    match = re.search(r'load_encoder\(("[^"]+"(?:, revision="[^"]+")?)[,)]', card)
    if match is None:
        return card
    return card.replace(f"({match[1]}", f"({load_arguments(repo_id, revision)}")


def _is_retryable(error: BaseException) -> bool:
    """Returns True if a retry may succeed: on a missing response, a conflict, a server error or too many requests."""
    if isinstance(error, OfflineModeIsEnabled):
        return False
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code in (408, 409, 412, 429)
    return isinstance(error, (HTTPError, ConnectionError, TimeoutError))


def later_command(folder: str | Path, hub_model_id: str, private: bool | None = None, **options: str | None) -> str:
    """Returns the shell command that pushes `folder` later with these `options`."""
    command = ["soft-trainer", "push", str(folder), hub_model_id]
    if private:
        command.append("--private")
    for name, value in options.items():
        if value and (name, value) != ("repo_type", "model"):
            command += [f"--{name}", value]
    return shlex.join(command)


def load_arguments(repo_id: str, revision: str | None = None) -> str:
    """Returns the arguments of `load_encoder` for a repository, such as `"USER/NAME", revision="dev"`, as text."""
    if revision:
        return f'"{repo_id}", revision="{revision}"'
    return f'"{repo_id}"'


def _create(api: HfApi, repo_id: str, private: bool | None, repo_type: str) -> None:
    """Creates the repository if it does not exist."""
    sdk = "static" if repo_type == "space" else None
    api.create_repo(repo_id, private=private, repo_type=repo_type, exist_ok=True, space_sdk=sdk)


def _client(repo_id: str, token: str | None, repo_type: str) -> HfApi:
    """Returns a client for `token` or, by default, the stored token. Raises UserError if there is no token.

    Also raises UserError unless `repo_id` is `USER/NAME`.
    """
    option = "push_data_to_hub" if repo_type == "dataset" else "hub_model_id"
    token = token or get_token()
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"{option}={repo_id!r}: {str(error).splitlines()[0]}") from error
    if repo_id.count("/") != 1:
        raise UserError(f"{option}={repo_id!r}: expected USER/NAME, where USER is you or one of your organisations")
    if not token:
        raise UserError(f"no token for the Hub: run `hf auth login` or set HF_TOKEN to one from {_TOKENS_PAGE}")
    return HfApi(token=token)


def _check_contents(folder: Path, contents: Mapping[str, Path | bytes], token: str) -> None:
    """Raises UserError if there is nothing to push, or if a file contains the token."""
    if not contents:
        raise UserError(f"{folder}: no files to push")
    for name, content in contents.items():
        if name.endswith(".safetensors"):
            continue
        if isinstance(content, Path):
            content = content.read_bytes()
        if token.encode() in content:
            raise UserError(f"{folder / name} contains the Hub token: remove it (and revoke it), then push again")


def reason(error: Exception) -> str:
    """Describes an error in one line, with advice if it is a common error from the Hub."""
    if not isinstance(error, HfHubHTTPError):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    status = error.response.status_code
    message = error.server_message or error.response.reason_phrase
    known = {
        401: f"the token is invalid; create one at {_TOKENS_PAGE}",
        403: "the token is not allowed to write there",
        404: "there is no such repository",
    }
    if status in known:
        return f"{known[status]} ({status}: {message})"
    return f"the Hub answered {status}: {message}"
